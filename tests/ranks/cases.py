"""Many cheap cases in one test: as many tests would take the ranks longer to begin and to end than to run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def case(name: object) -> Iterator[None]:
    """Say which case it was, if one fails."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as wrong:
        raise AssertionError(f"in the case {name}: {wrong}") from wrong
