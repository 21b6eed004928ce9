"""What tells reductions apart: the key of their program, and the text that ranks compare."""

from dataclasses import fields, replace

import numpy as np
import pytest

from mpistrat.communicator.options import DEFAULTS, CommunicationOptions
from mpistrat.communicator.planning import Reduction
from mpistrat.reduction import ReduceOp

OTHERS = {
    "bytes_per_pack": 7,
    "timeout_seconds": 3.0,
    "implementation": "RING",
    "algorithm": "flat",
    "wire_dtype": "bfloat16",
    "deterministic": True,
    "error_feedback": True,
    "intra_dtype": "native",
    "num_packs": 2,
}
"""Of each option another value than the default."""


@pytest.mark.parametrize("name", [field.name for field in fields(CommunicationOptions)])
def test_options_but_those_in_which_ranks_may_differ_have_a_program_and_a_text_of_their_own(name):
    usual = replace(DEFAULTS, wire_dtype="float16") if name == "error_feedback" else DEFAULTS
    one, other = (Reduction(ReduceOp.SUM, [np.ones(3)], options) for options in (usual, replace(usual, **{name: OTHERS[name]})))
    may_differ = name in ("timeout_seconds", "implementation")
    assert (one.key == other.key, str(one) == str(other)) == (may_differ, may_differ)


def test_the_text_tells_what_is_not_usual():
    options = replace(DEFAULTS, wire_dtype="bfloat16", error_feedback=True, num_packs=2)
    text = "(SUM, [float64 (3,)], algorithm=auto, bytes_per_pack=0, wire_dtype=bfloat16, error_feedback=True, num_packs=2)"
    assert str(Reduction(ReduceOp.SUM, [np.ones(3)], options)) == text
