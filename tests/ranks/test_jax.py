"""`mpistrat.jax`: averages of pytrees between compiled functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import mpistrat.jax
from mpistrat.errors import AgreementError, UnsupportedDtypeError
from tests.launches import on_ranks
from tests.other_arrays import installed

pytestmark = on_ranks(2)  # the library is heavy to start, and other numbers of ranks would tell nothing new


class Layer(NamedTuple):
    weight: Any
    bias: Any


@pytest.fixture
def jax():
    return installed("jax")


@pytest.fixture
def average(jax, comm):
    with mpistrat.Communicator(comm) as communicator:
        yield lambda tree: mpistrat.jax.average(tree, communicator)


def test_leaves_are_averaged_and_the_tree_is_kept(jax, average, comm):
    numbers = jax.numpy
    tree = {
        "layer": Layer(numbers.full((2, 3), comm.rank + 1.0), numbers.zeros(3)),
        "none": None,
        "step": [np.float32(comm.rank)],
    }
    found = average(tree)
    mean = (comm.size + 1) / 2
    assert isinstance(found["layer"], Layer)
    assert isinstance(found["layer"].weight, jax.Array)
    assert found["layer"].weight.tolist() == [[mean] * 3] * 2
    assert (found["none"], float(found["step"][0])) == (None, mean - 1)
    assert average({}) == {}


def test_what_is_traced_is_refused(jax, average):
    with pytest.raises(UnsupportedDtypeError, match=r"tree\['w'\]"):
        jax.jit(average)({"w": jax.numpy.ones(2)})


def test_whole_numbers_have_no_mean(jax, average):
    with pytest.raises(UnsupportedDtypeError, match=r"tree\['steps'\] has dtype int32, whose mean would be a whole number"):
        average({"steps": jax.numpy.ones(2, "int32")})


def test_other_trees_are_told(jax, average, comm):
    with pytest.raises(TypeError, match="average takes a Communicator, or None for all ranks of the job; got Intracomm"):
        mpistrat.jax.average({}, comm)
    ones = jax.numpy.ones(2)
    with pytest.raises(AgreementError, match="average of PyTreeDef"):
        average({"a": ones, "b": ones} if comm.rank else {"a": ones, "c": ones})
