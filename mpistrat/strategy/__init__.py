"""Strategies and replica contexts: the interface of tf.distribute."""

from mpistrat.strategy import one_device as one_device  # importing the layer registers the default strategy
