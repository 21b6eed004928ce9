"""TensorFlow's names below `experimental`, imported as programs for TensorFlow do."""

import importlib

import pytest

import mpistrat
from mpistrat.experimental.partitioners import FixedShardsPartitioner
from mpistrat.parameter_server.coordinator import ClusterCoordinator


@pytest.mark.parametrize(("module", "known"), [("coordinator", ClusterCoordinator), ("partitioners", FixedShardsPartitioner)])
def test_what_tensorflow_has_as_a_module_is_one(module, known):
    imported = importlib.import_module(f"mpistrat.experimental.{module}")
    assert imported is getattr(mpistrat.experimental, module)
    assert getattr(imported, known.__name__) is known
