"""How the components of values are combined, and where the results land: the CrossDeviceOps of tf.distribute."""
