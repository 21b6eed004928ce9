"""Many cheap cases in one test: as many tests would take the ranks longer to begin and to end than to run. And threads."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest


@contextmanager
def case(name):
    """Say which case it was, if one fails."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as wrong:
        raise AssertionError(f"in the case {name}: {wrong}") from wrong


def on_thread(call, *given, name="other"):
    """Return what a call on another thread returns, or raise what it raises."""
    with ThreadPoolExecutor(1, name) as pool:
        return pool.submit(call, *given).result()
