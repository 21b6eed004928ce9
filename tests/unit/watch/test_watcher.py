"""The watching thread: what it is told between two of its looks."""

from __future__ import annotations

import pytest

from mpistrat.errors import AgreementError, UnavailableError
from mpistrat.watch.watcher import Watcher


def test_failures_of_two_communicators_at_once_are_both_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watcher, "_run", lambda self: None)  # its steps are taken below
    watcher = Watcher(2)
    watcher.post_failure((71, 3), UnavailableError("the first"))
    watcher.post_failure((72, 1), AgreementError("the second"))
    watcher._step()
    told = [watcher._notices.first({key}) for key in ((71, 3), (72, 1))]
    assert [notice and notice.text for notice in told] == ["the first", "the second"]
    assert watcher._notices.first({(73, 1)}) is None
