"""One GPU, several ranks; and what of the device's parts a host can prove."""
