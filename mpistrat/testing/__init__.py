"""For the person adding a part."""
