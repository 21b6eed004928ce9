"""Elements made ahead, and a thread that ends when it should."""

import threading
import time

import pytest

from mpistrat.inputs.prefetch import Prefetcher
from tests.processes import until


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "mpistrat-prefetch"]


def is_idle():
    """Return whether no thread of ours is left, or will be soon."""
    return until(lambda: not threads(), 30)


def settled(made):
    """Return how many elements were made when no more are coming."""
    count = -1
    while count != len(made):
        count = len(made)
        time.sleep(0.05)
    return count


def counting(made, stop=1000):
    for number in range(stop):
        made.append(number)
        yield number


@pytest.mark.parametrize("buffer_size", [1, 2, 7])
def test_elements_come_in_order_and_the_thread_ends_with_them(buffer_size):
    elements = Prefetcher(counting([], 20), buffer_size)
    assert list(elements) == list(range(20))
    assert list(elements) == []
    assert is_idle()


@pytest.mark.parametrize("buffer_size", [1, 3])
def test_so_many_elements_are_made_ahead_and_no_more(buffer_size):
    made = []
    elements = Prefetcher(counting(made), buffer_size)
    assert settled(made) == buffer_size
    assert next(elements) == 0
    assert settled(made) == buffer_size + 1
    elements.close()
    assert is_idle()


def test_an_error_is_raised_where_it_falls_due():
    def failing():
        yield 1
        yield 2
        raise KeyError("no such file")

    elements = Prefetcher(failing(), 3)
    assert [next(elements), next(elements)] == [1, 2]
    with pytest.raises(KeyError, match="no such file") as caught:
        next(elements)
    assert any(entry.name == "failing" for entry in caught.traceback)
    with pytest.raises(StopIteration):
        next(elements)
    assert is_idle()


def test_even_an_exit_does_not_leave_the_consumer_waiting():
    def exiting():
        raise SystemExit(3)
        yield

    with pytest.raises(SystemExit):
        next(Prefetcher(exiting(), 1))
    assert is_idle()


def test_closing_lets_the_source_go_and_ends_the_iteration():
    ended = threading.Event()

    def source():
        try:
            yield from range(100)
        finally:
            ended.set()

    elements = Prefetcher(source(), 1)
    next(elements)
    elements.close()
    elements.close()
    assert ended.wait(2)
    assert list(elements) == []
    assert is_idle()
