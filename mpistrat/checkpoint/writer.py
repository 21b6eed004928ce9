"""Writer: writes a checkpoint in the background, while the job goes on; the threads of all ranks meet by messages."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpistrat import ending
from mpistrat.arrays import Array
from mpistrat.checkpoint.files import Manifest, Piece, file_name, remove, write_manifest, write_pieces
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.errors import CheckpointError
from mpistrat.launch import abort, end_of_job
from mpistrat.logger import logger
from mpistrat.text import format_bytes, format_seconds
from mpistrat.watch.recorder import watched

_POLL_SECONDS = 0.002
_NICER = 10
"""By how much the thread that writes is nicer than the program: where steps take all cores, they lose a quarter less to it."""
_started = list["Writer"]()  # until somebody has seen how it has ended


class Save(NamedTuple):
    """What a rank writes: its pieces, of arrays that nobody changes; rank 0 then writes the manifest, and removes `outdated`.

    The folder's name is durable once the folders `made_in` are synchronized, before the manifest is written. `Writer.finish`
    calls `when_durable`, if all went well.
    """

    folder: Path
    manifest: Manifest
    pieces: Sequence[Piece]
    arrays: Sequence[Array]
    made_in: Sequence[Path]
    outdated: Sequence[Path]
    when_durable: Callable[[], None]
    seconds_waited: float  # of the step
    is_awaited: bool  # by the program, which does nothing else meanwhile


class Writer:
    """What writes the checkpoints of a communicator, one at a time. Making one is a collective call.

    What goes wrong on a rank before it starts to write is told to all. So all ranks start, and their threads find each other,
    also where a collective of the program has failed meanwhile: a wait ends, unless a file system hangs.
    """

    def __init__(self, communicator: BaseCommunicator) -> None:
        self.rank, self.size, self.is_closed = communicator.rank, communicator.size, False
        self._comm: Any = None  # ranks that are alone send nothing
        if isinstance(communicator, Communicator) and self.size > 1:
            self._comm = communicator.hierarchy.world_group.comm.Dup()
            self._members = communicator.hierarchy.members
        self._thread: threading.Thread | None = None
        self._error = ""
        self._when_durable: Callable[[], None] = lambda: None
        self.longest_seconds = 0.0  # of the saves so far, from the call until it was durable

    def start(self, save: Save) -> None:
        """Write what is saved; `finish` waits for it."""
        self._when_durable, self._error = save.when_durable, f"rank {self.rank}: the thread that writes has ended"
        # not a daemon: the interpreter waits for it
        self._thread = threading.Thread(target=self._run, args=(save,), name="mpistrat-checkpoint")
        self._thread.start()
        _started.append(self)

    def finish(self) -> None:
        """Wait until what was started is durable; raise CheckpointError on all ranks, if one of them could not write."""
        if self._thread is None:
            return
        with watched("Checkpoint: a save", self._members) if self._comm is not None else nullcontext():
            self._thread.join()
        self._thread = None
        _started.remove(self)
        if self._error:
            raise CheckpointError(f"{self._error}. The last checkpoint before it is whole")
        self._when_durable()

    def close(self) -> None:
        """Finish, and free the communicator. A collective call."""
        self.is_closed = True
        try:
            self.finish()
        finally:
            if self._comm is not None:
                self._comm.Free()
            self._comm = None

    def _run(self, save: Save) -> None:
        """Write, in the thread; rank 0 then tells it, and removes what is outdated."""
        if not save.is_awaited:
            time.sleep(_POLL_SECONDS)  # the call returns meanwhile: then this thread keeps the interpreter, until it writes
            with suppress(OSError):  # Linux has a priority of each thread
                os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + _NICER, 19))
        started = time.perf_counter()
        self._error = self._write(save)
        seconds = time.perf_counter() - started
        self.longest_seconds = max(self.longest_seconds, save.seconds_waited + seconds)
        if self.rank or self._error:
            return
        manifest, waited = save.manifest, format_seconds(save.seconds_waited)
        amount, rate = format_bytes(manifest.num_bytes), format_bytes(int(manifest.num_bytes / seconds))
        end_of_job.note_saved(manifest.step)
        logger.info(f"step {manifest.step}: {amount} in {save.folder}, at {rate}/s; the step waited {waited}")
        for each in save.outdated:
            try:
                remove(each)
            except OSError as error:
                logger.warning(f"the older checkpoint {each} cannot be removed: {error}")

    def _write(self, save: Save) -> str:
        """Write, and return why it has failed on some rank, an empty text if it has not."""
        folder, written, error = save.folder, list[Piece](), ""
        try:
            written = write_pieces(folder / file_name(self.rank), save.pieces, save.arrays)
        except Exception as failed:  # the library that writes arrays has exceptions of its own
            error = _text(self.rank, folder, failed)
        if self.rank:
            self._send((written, error), 0)
            return str(self._receive(0))
        found = [(written, error), *map(self._receive, range(1, self.size))]
        error = "; ".join(text for _, text in found if text)
        try:
            if not error:
                every = {file_name(rank): each for rank, (each, _) in enumerate(found) if each}
                write_manifest(folder, save.manifest._replace(pieces=every), save.made_in)
        except Exception as failed:  # whatever it is, the others wait
            error = _text(0, folder, failed)
        if error:
            with suppress(OSError):  # what fails here has been told, or is removed by another save
                remove(folder)  # the disk may be full; and a manifest may be there that is not durable
        for rank in range(1, self.size):
            self._send(error, rank)
        return error

    def _send(self, value: Any, rank: int) -> None:
        request = self._comm.isend(value, rank)
        while not request.test()[0]:  # waiting in MPI would take a core from the program
            time.sleep(_POLL_SECONDS)

    def _receive(self, rank: int) -> Any:
        while (message := self._comm.improbe(rank)) is None:
            time.sleep(_POLL_SECONDS)
        return message.recv()


def _text(rank: int, folder: Path, error: Exception) -> str:
    return f"rank {rank}: {folder} cannot be written: {type(error).__name__}: {error}"


def _finish_started() -> None:
    for writer in list(_started):
        try:
            writer.finish()
        except CheckpointError as error:
            abort.end(error)


ending.at(ending.Stage.FINISH, _finish_started)
