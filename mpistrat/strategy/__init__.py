"""Strategies and replica contexts: the interface of tf.distribute."""

from mpistrat.strategy import strategy as strategy  # importing the layer registers the default strategy
