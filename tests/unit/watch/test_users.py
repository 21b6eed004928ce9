"""Frames of the user's program, seen from another thread."""

from __future__ import annotations

import gc
import sys

import pytest

from mpistrat.watch.users import collection_paused


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="looking at a frame collects no garbage there")
def test_no_garbage_is_collected_while_frames_are_looked_at() -> None:
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_program_without_collection_stays_without() -> None:
    gc.disable()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
