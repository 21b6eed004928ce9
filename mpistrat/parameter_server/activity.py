"""Activity: what a task is doing, recorded for `mpistrat doctor` and the stall reports of other ranks."""

from __future__ import annotations

from functools import lru_cache

from mpistrat.watch.recorder import encoded_activity, recorder

__all__ = ["Activity"]


class Activity:
    """The record of what this task does: what it runs, and what that waits for. Setting it takes half a microsecond.

    Parameters
    ----------
    task : str
        The task of this rank.
    """

    def __init__(self, task: str) -> None:
        self._task, self._text, self._recorder = task, "", recorder()

    def set(self, text: str) -> None:
        """Record what the task does; an empty text clears it."""
        self._text = text
        self._recorder.set_activity(_encoded(self._task, text))

    def wait_for(self, what: str) -> None:
        """Record what the task waits for, until `resume`."""
        text = f"{self._text}, waits for {what}" if self._text else f"waits for {what}"
        self._recorder.set_activity(_encoded(self._task, text))

    def resume(self) -> None:
        """Record that the task waits no longer."""
        self.set(self._text)


@lru_cache(256)
def _encoded(task: str, text: str) -> bytes:
    return encoded_activity(f"{task} {text}" if text else "")
