"""Open MPI's banners of an aborted job come last, once and without NUL bytes; everything else is handed on as it comes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from mpistrat.launch import banners
from mpistrat.launch.banners import Banners, relay

LINE = b"-" * 74 + b"\n"
ABORT = LINE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Proc: [[1,1],1]\n\nNOTE: it ends.\n" + LINE
EXITED = LINE + b'prterun has exited due to process rank 1 with PID 0 on node vm calling\n"abort". This may have\n' + LINE
TRACEBACK = b"[rank 1 on vm] Traceback (most recent call last):\n[rank 1 on vm] ValueError: planted\n"


def through(*pieces: bytes) -> bytes:
    held = Banners()
    return b"".join([*map(held.feed, pieces), held.end()])


@pytest.mark.parametrize("size", [1, 7, 74, 1000])
def test_banners_come_after_the_traceback_once_and_without_nul(size: int) -> None:
    text = b"half a line" + ABORT + b"\0" + EXITED + TRACEBACK + ABORT.replace(b"rank 1", b"rank 0") + b"\0"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert through(*pieces) == b"half a line" + TRACEBACK + ABORT + EXITED


def test_lines_may_begin_with_the_rank() -> None:
    tagged = b"".join(b"[1]<stderr>: " + line for line in ABORT.splitlines(keepends=True))
    trace = b"[0]<stderr>: Traceback\n"
    assert through(tagged, b"[1]<stderr>: \0", EXITED, trace) == trace + tagged + EXITED


@pytest.mark.parametrize(
    "text",
    [
        b"bytes of a program: \0\1\2\xff",
        b"---- a heading ----\n",
        b"-" * 200,
        LINE + b"what a program says of itself\n" + LINE,
        LINE + b"prterun noticed that process rank 1 with PID 7 on node vm exited on\nsignal 9 (Killed).\n" + LINE,
        LINE + b"MPI_ABORT was invoked, and the rest is lost",
    ],
)
def test_everything_else_stays(text: bytes) -> None:
    assert through(text) == text
    assert through(*(text[index : index + 1] for index in range(len(text)))) == text


def test_what_can_be_no_banner_is_printed_at_once() -> None:
    held = Banners()
    for text in (b"no end of line", b"\n", b"- ", LINE[:20] + b" heading\n", LINE + b"Loss: 3"):
        assert held.feed(text) == text
        assert not held.is_undecided


def test_messages_of_mpiexec_lose_their_nul() -> None:
    message = LINE + b"There are not enough slots available in the system\n" + LINE
    assert through(message + b"\0", b"a\0b") == message + b"ab"


def test_a_long_log_costs_little() -> None:
    chunk, held = (b"x" * 99 + b"\n") * 655, Banners()
    started = time.process_time()
    for _ in range(128):  # 8 MB, for which a pattern at every byte takes seconds
        assert held.feed(chunk) == chunk
    assert time.process_time() - started < 0.3


@pytest.fixture
def relayed() -> Callable[[], tuple[int, int, threading.Thread]]:
    def begin() -> tuple[int, int, threading.Thread]:
        source, writer = os.pipe()
        reader, target = os.pipe()
        thread = threading.Thread(target=relay, args=(source, target))
        thread.start()
        return writer, reader, thread

    return begin


def test_a_row_of_dashes_does_not_wait_for_ever(relayed: Callable[[], tuple[int, int, threading.Thread]]) -> None:
    writer, reader, thread = relayed()
    os.write(writer, b"-" * 74)  # a progress bar, which goes on in an hour
    assert os.read(reader, 1000) == b"-" * 74
    os.close(writer)
    thread.join(10)
    assert not thread.is_alive()


def test_writers_see_that_nobody_reads(
    relayed: Callable[[], tuple[int, int, threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banners, "_READ_BYTES", 10)
    writer, reader, thread = relayed()
    os.close(reader)
    os.write(writer, b"x")
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"y")
    os.close(writer)


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    source, writer = os.pipe()
    reader, target = os.pipe()
    os.set_blocking(target, False)
    thread = threading.Thread(target=relay, args=(source, target))
    thread.start()
    text = b"x" * 300_000

    def write() -> None:
        with os.fdopen(writer, "wb") as stream:
            stream.write(text)

    threading.Thread(target=write).start()
    got = b""
    while len(got) < len(text):
        got += os.read(reader, 1 << 16)
    thread.join(10)
    assert got == text
    for end in (reader, target):
        os.close(end)
