"""Communication options: what is accepted, whose fields win, and which make another program and text of a reduction."""

import dataclasses
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.communicator.options import DEFAULTS, CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.communicator.planning import Reduction
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp

AUTO, RING, NCCL = CommunicationImplementation

options = st.builds(
    CommunicationOptions,
    bytes_per_pack=st.integers(0, 3),
    timeout_seconds=st.none() | st.floats(0, 3),
    implementation=st.sampled_from(CommunicationImplementation),
    algorithm=st.sampled_from([None, "auto", "flat"]),
    wire_dtype=st.sampled_from([None, "native", "bfloat16", "float16"]),
    intra_dtype=st.sampled_from([None, "float32", "native"]),
    num_packs=st.none() | st.integers(0, 3),
)


def test_options_of_a_call_restore_a_default():
    merged = CommunicationOptions(5, deterministic=True).merge(CommunicationOptions(deterministic=False))
    assert merged == CommunicationOptions(5, deterministic=False)


@given(options, options)
def test_merging_takes_each_field_from_one_of_the_two(one, other):
    merged = one.merge(other)
    for field in dataclasses.fields(CommunicationOptions):
        theirs = getattr(other, field.name)
        assert getattr(merged, field.name) == (theirs if theirs != field.default else getattr(one, field.name))
    assert one.merge(None) == one == one.merge(CommunicationOptions())
    assert hash(one) == hash(dataclasses.replace(one))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.bytes_per_pack = 3


@pytest.mark.parametrize("name", ["ring", "RING", "Ring", RING])
def test_an_implementation_is_known_by_name(name):
    assert CommunicationOptions(implementation=name).implementation is RING


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack must be 0 or a positive number of bytes; got -1"),
        ({"timeout_seconds": -0.5}, "timeout_seconds must be None or a number of seconds >= 0; got -0.5"),
        ({"implementation": "foo"}, "implementation must be one of AUTO, RING, NCCL; got 'foo'"),
        ({"wire_dtype": "int8"}, "wire_dtype must be native, bfloat16 or float16; got 'int8'"),
        ({"intra_dtype": "bfloat16"}, "intra_dtype must be float32 or native; got 'bfloat16'"),
        ({"deterministic": True, "intra_dtype": "native"}, "excludes intra_dtype='native': nodes decide what is rounded"),
        ({"deterministic": "no"}, "deterministic must be True or False; got 'no'"),
        ({"deterministic": True, "wire_dtype": "float16"}, "excludes wire_dtype='float16': nodes decide what is cast"),
        ({"num_packs": 1.5}, "num_packs must be None, 0 .each array by itself. or positive; got 1.5"),
        ({"num_packs": "2"}, "num_packs must be None, 0 .each array by itself. or positive; got '2'"),
        ({"implementation": 3}, "implementation must be one of AUTO, RING, NCCL; got 3"),
    ],
)
def test_what_is_not_accepted_is_refused_with_what_is(wrong, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        CommunicationOptions(**wrong)
    assert isinstance(caught.value, ValueError)


def test_what_excludes_each_other_is_not_merged():
    with pytest.raises(InvalidArgumentError, match="deterministic=True excludes wire_dtype='bfloat16'"):
        CommunicationOptions(deterministic=True).merge(CommunicationOptions(wire_dtype="bfloat16"))
    assert CommunicationOptions(deterministic=True).merge(CommunicationOptions(7)).deterministic
    with pytest.raises(InvalidArgumentError, match="options must be CommunicationOptions or None; got \\['sum'\\]"):
        CommunicationOptions().merge(["sum"])


def test_hints_are_options_by_their_old_name():
    with pytest.warns(DeprecationWarning, match="CollectiveHints is deprecated; use CommunicationOptions") as warned:
        hints = CollectiveHints(50, timeout_seconds=3)
    assert hints == CommunicationOptions(bytes_per_pack=50, timeout_seconds=3)
    assert warned[0].filename == __file__
    with (
        pytest.warns(DeprecationWarning, match="CollectiveHints"),
        pytest.raises(InvalidArgumentError, match="bytes_per_pack must be 0 or a positive"),
    ):
        CollectiveHints(bytes_per_pack=-1)


OTHERS = {
    "bytes_per_pack": 7,
    "timeout_seconds": 3.0,
    "implementation": "RING",
    "algorithm": "flat",
    "wire_dtype": "bfloat16",
    "deterministic": True,
    "intra_dtype": "native",
    "num_packs": 2,
}
"""Of each option another value than the default."""


@pytest.mark.parametrize("name", [field.name for field in fields(CommunicationOptions)])
def test_options_but_those_in_which_ranks_may_differ_have_a_program_and_a_text_of_their_own(name):
    options = DEFAULTS, replace(DEFAULTS, **{name: OTHERS[name]})
    one, other = (Reduction(ReduceOp.SUM, [np.ones(3)], each) for each in options)
    may_differ = name in ("timeout_seconds", "implementation")
    assert (one.key == other.key, str(one) == str(other)) == (may_differ, may_differ)


def test_the_text_tells_what_is_not_usual():
    options = replace(DEFAULTS, wire_dtype="bfloat16", num_packs=2)
    text = "(SUM, [float64 (3,)], algorithm=auto, bytes_per_pack=0, wire_dtype=bfloat16, num_packs=2)"
    assert str(Reduction(ReduceOp.SUM, [np.ones(3)], options)) == text
