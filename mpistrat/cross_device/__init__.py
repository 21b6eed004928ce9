"""CrossDeviceOps, as in tf.distribute: reduce the components of values, and deliver the results to destinations."""
