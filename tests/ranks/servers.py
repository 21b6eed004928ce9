"""Parameter servers in a test: rank 0 is the chief, those after it are servers, the others workers."""

from functools import partial
from inspect import Parameter, Signature, signature

import pytest

import mpistrat
from mpistrat.experimental.partitioners import FixedShardsPartitioner


def on_chief(partitioner=None, num_servers=(2,)):
    """Have the chief run a test with its coordinator, while the other ranks serve; a test may get a number of shards."""

    def made(test):
        def served(num_servers, **given):
            shards = FixedShardsPartitioner(given["num_shards"]) if "num_shards" in given else partitioner
            serve(num_servers, partial(test, **given), shards)

        served.__name__, served.__doc__, served.__module__ = test.__name__, test.__doc__, test.__module__
        own = [one for name, one in signature(test).parameters.items() if name != "coordinator"]
        served.__signature__ = Signature([Parameter("num_servers", Parameter.POSITIONAL_OR_KEYWORD), *own])
        return pytest.mark.parametrize("num_servers", num_servers)(served)

    return made


def serve(num_servers, program, partitioner=None, **named):
    resolver = mpistrat.cluster_resolver.MPIClusterResolver(chief=1, ps=num_servers)
    return mpistrat.experimental.ParameterServerStrategy.main(program, resolver, partitioner, **named)


def variable(coordinator, value, **named):
    with coordinator.strategy.scope():
        return mpistrat.Variable(value, **named)
