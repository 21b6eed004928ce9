"""Tracebacks of uncaught exceptions: they end with the user's line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.launch.exception_text import format_exception
from mpistrat.text import parse_spans

_HINT = "MPISTRAT_TRACEBACK=full"


def _text_of(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except Exception as error:
        return format_exception(error, "rank 3 on node1").splitlines()
    raise AssertionError("nothing was raised")


def _cause() -> None:
    try:
        raise KeyError("w")
    except KeyError as error:
        raise ValueError("two\nlines") from error


def test_every_line_says_whose_it_is_and_causes_are_told() -> None:
    lines = _text_of(_cause)
    assert all(line.startswith("[rank 3 on node1] ") for line in lines)
    assert "[rank 3 on node1] KeyError: 'w'" in lines
    assert lines[-2:] == ["[rank 3 on node1] ValueError: two", "[rank 3 on node1] lines"]


def test_frames_of_the_library_are_left_out() -> None:
    lines = _text_of(lambda: CommunicationOptions(bytes_per_pack=-1))
    places = [line for line in lines if "  File " in line]
    assert "test_exception_text.py" in places[-1]
    assert not [line for line in places if "mpistrat/communicator" in line]
    assert _HINT in lines[-2]
    assert "bytes_per_pack" in lines[-1]


def test_they_are_shown_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISTRAT_TRACEBACK", "full")
    lines = _text_of(lambda: CommunicationOptions(bytes_per_pack=-1))
    assert [line for line in lines if "mpistrat/communicator/options.py" in line]
    assert not [line for line in lines if _HINT in line]


def test_an_error_that_arose_in_the_library_without_a_raise_keeps_its_frames() -> None:
    lines = _text_of(lambda: parse_spans(7))  # type: ignore[arg-type]
    assert [line for line in lines if "mpistrat/text.py" in line]


def test_a_setting_that_cannot_be_read_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISTRAT_TRACEBACK", "short-ish")
    assert [line for line in _text_of(lambda: CommunicationOptions(bytes_per_pack=-1)) if "options.py" in line]
