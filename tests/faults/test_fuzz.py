"""A slice of ``python -m tests.fuzz``: random legal programs with random settings, such as messages of 500 bytes at most."""

import pytest

from tests.fuzz.__main__ import play


@pytest.mark.parametrize(("shape", "seed"), [("2x1", 5), ("3+1", 3)])
def test_random_programs_are_right(shape, seed):
    wrong = [f"{failure.command}\n{failure.text}" for failure in play(shape, seed, 60)]
    assert not wrong, "\n".join(wrong)
