"""Strategies and replica contexts: the interface of tf.distribute."""

from mpistrat.context.stack import experimental_set_strategy as experimental_set_strategy
from mpistrat.context.stack import get_replica_context as get_replica_context
from mpistrat.context.stack import get_strategy as get_strategy
from mpistrat.context.stack import has_strategy as has_strategy
from mpistrat.context.stack import in_cross_replica_context as in_cross_replica_context
from mpistrat.strategy import one_device as one_device  # importing the layer registers the default strategy
