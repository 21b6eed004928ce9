"""Examples that Hypothesis draws: how fast a machine is fails none of them."""

import time

from hypothesis import given
from hypothesis import strategies as st


@given(st.just(0.25))
def test_an_example_may_take_longer_than_usual(seconds: float) -> None:
    time.sleep(seconds)
