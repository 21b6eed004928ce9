"""Writer: writes a checkpoint in the background, while the job goes on; the threads of all ranks meet by messages."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from mpistrat.arrays import Array
from mpistrat.checkpoint.files import Manifest, Piece, file_name, write_manifest, write_pieces
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.errors import CheckpointError, UnavailableError
from mpistrat.launch import abort
from mpistrat.logger import logger
from mpistrat.text import format_bytes, format_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

_POLL_SECONDS = 0.002
_open: WeakSet[Writer] = WeakSet()


class Writer:
    """What writes the checkpoints of a communicator, one at a time. Making one is a collective call."""

    def __init__(self, communicator: BaseCommunicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._comm: MPI.Intracomm | None = None
        self._is_lost: Callable[[], bool] = lambda: False
        if isinstance(communicator, Communicator) and self.size > 1:
            self._comm, self._is_lost = communicator.hierarchy.world_group.comm.Dup(), communicator.is_broken
        self._thread: threading.Thread | None = None
        self._error = ""
        _open.add(self)

    def start(
        self,
        folder: Path,
        manifest: Manifest,
        pieces: list[Piece],
        arrays: list[Array],
        when_durable: Callable[[], None],
        waited: float,
    ) -> None:
        """Write this rank's pieces, of `arrays` that nobody changes; rank 0 then writes the manifest.

        `when_durable` is called on each rank once the checkpoint is durable; the step has `waited` for so many seconds.
        """
        started = time.perf_counter()

        def write() -> None:
            error = self._write(folder, manifest, pieces, arrays)
            if not error:
                seconds = time.perf_counter() - started
                try:
                    when_durable()
                except OSError as failed:
                    error = f"{folder} is durable, but an earlier checkpoint cannot be removed: {failed}"
                if self.rank == 0:
                    amount, rate = format_bytes(manifest.num_bytes), format_bytes(int(manifest.num_bytes / seconds))
                    pause = format_seconds(waited)
                    logger.info(f"step {manifest.step}: {amount} in {folder}, at {rate}/s; the step waited {pause}")
            self._error = error

        # not a daemon: the interpreter waits for it
        self._thread = threading.Thread(target=write, name="mpistrat-checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Wait until what was started is durable.

        Raises
        ------
        CheckpointError
            On all ranks, if one of them could not write.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, ""
        if error:
            raise CheckpointError(f"{error}. The last checkpoint before it is whole")

    def close(self) -> None:
        """Finish, and free the communicator. A collective call."""
        _open.discard(self)
        try:
            self.finish()
        finally:
            if self._comm is not None and not self._is_lost():
                self._comm.Free()
            self._comm = None

    def _write(self, folder: Path, manifest: Manifest, pieces: list[Piece], arrays: list[Array]) -> str:
        """Write, and return why it has failed on some rank, an empty text if it has not."""
        written, error = [], ""
        try:
            if pieces:
                written = write_pieces(folder / file_name(self.rank), pieces, arrays)
        except Exception as failed:  # the library that writes arrays has exceptions of its own
            error = f"rank {self.rank}: {folder} cannot be written: {type(failed).__name__}: {failed}"
        try:
            found = self._gather((written, error))
            if self.rank == 0:
                error = "; ".join(text for _, text in found if text)
                if not error:
                    every = {file_name(rank): each for rank, (each, _) in enumerate(found) if each}
                    try:
                        write_manifest(folder, manifest._replace(pieces=every))
                    except OSError as failed:
                        error = f"rank 0: {folder} cannot be written: {failed}"
            return self._bcast(error)
        except UnavailableError as lost:
            return str(lost)

    def _gather(self, mine: Any) -> list[Any]:
        """Return what all ranks pass, on rank 0."""
        if self._comm is None:
            return [mine]
        if self.rank:
            self._send(mine, 0)
            return []
        return [mine, *(self._receive(rank) for rank in range(1, self.size))]

    def _bcast(self, text: str) -> str:
        """Return the text of rank 0."""
        if self._comm is None:
            return text
        if self.rank:
            return str(self._receive(0))
        for rank in range(1, self.size):
            self._send(text, rank)
        return text

    def _send(self, value: Any, rank: int) -> None:
        assert self._comm is not None, "ranks that are alone send nothing"
        request = self._comm.isend(value, rank)
        self._poll(lambda: request.test()[0])

    def _receive(self, rank: int) -> Any:
        assert self._comm is not None, "ranks that are alone receive nothing"
        comm, found = self._comm, list[Any]()

        def has_come() -> bool:
            message = comm.improbe(rank)
            if message is not None:
                found.append(message.recv())
            return bool(found)

        self._poll(has_come)
        return found[0]

    def _poll(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if self._is_lost():
                raise UnavailableError("the checkpoint was not written to its end: a collective has failed meanwhile")
            time.sleep(_POLL_SECONDS)


@atexit.register
def _finish_open() -> None:
    for writer in list(_open):
        try:
            writer.finish()
        except CheckpointError as error:
            abort.end(error)
