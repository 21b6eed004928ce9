"""What the user holds."""

from mpistrat.strategy import base as base  # importing the layer registers the default strategy
