"""Prefetcher: a thread reads elements ahead while the program computes.

File law: the thread does not communicate, and holds no reference to the Prefetcher, so that it ends with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

__all__ = ["Prefetcher"]


class Prefetcher(Iterator[Any]):
    """Iterates over the elements of `source`, which a thread reads ahead. Errors of the source are raised in order.

    The thread ends when the source does, when this is closed, or when it is garbage-collected; an element that is being
    read is still completed.

    Parameters
    ----------
    source : iterator
        From now on used by the thread only.
    buffer_size : int
        How many elements are read ahead; at least 1.
    """

    def __init__(self, source: Iterator[Any], buffer_size: int) -> None:
        self._made: SimpleQueue[_Made] = SimpleQueue()
        self._slots = threading.Semaphore(buffer_size)
        stopped = threading.Event()
        self._stop = weakref.finalize(self, _stop, stopped, self._slots)
        arguments = (source, self._made, self._slots, stopped)
        threading.Thread(target=_fill, args=arguments, name="mpistrat-prefetch", daemon=True).start()

    def close(self) -> None:
        """End the thread and the iteration."""
        self._stop()

    def __next__(self) -> Any:
        if not self._stop.alive:
            raise StopIteration
        made = self._made.get()
        self._slots.release()
        if made.is_last:
            self.close()
            raise made.error or StopIteration
        return made.element


class _Made(NamedTuple):
    """An element; or the end, with the error if there was one."""

    element: Any = None
    is_last: bool = False
    error: BaseException | None = None


def _fill(source: Iterator[Any], made: SimpleQueue[_Made], slots: threading.Semaphore, stopped: threading.Event) -> None:
    while True:
        slots.acquire()
        if stopped.is_set():
            return
        try:
            made.put(_Made(next(source)))
        except StopIteration:
            made.put(_Made(is_last=True))
            return
        except BaseException as error:  # of any kind: the consumer waits for an element or an error
            made.put(_Made(is_last=True, error=error))
            return


def _stop(stopped: threading.Event, slots: threading.Semaphore) -> None:
    stopped.set()
    slots.release()
