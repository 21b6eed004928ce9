"""One rank of saves and restores: mpistrat, PyTorch's distributed checkpoint on gloo, and `numpy.savez` of the chief, in turns.

``mpistrat run -n 2 tests/benchmarks/peers/checkpoint_ranks.py '[[3, 1], [1]]' 268435456 5``: how the bytes are divided into
arrays, in one way or several, how many bytes, and rounds. For each division rank 0 prints what all took in each round, on the
slowest rank; beside that a copy of its share, and a plain write.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel_ranks import join_gloo
from mpi4py import MPI

import mpistrat
from mpistrat.tools.bench import slowest_seconds

_ALIGNMENT = 1 << 12
_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.001


def main() -> None:
    divisions, num_bytes, rounds = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.getLogger("mpistrat").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    join_gloo(comm)
    root = Path(comm.bcast(tempfile.mkdtemp(prefix="checkpoints-")))
    try:
        for sizes in divisions:
            arrays = [np.ones(size * (num_bytes // 4) // sum(sizes), np.float32) for size in sizes]
            _Race(comm, root, arrays).run(rounds)
    finally:
        comm.Barrier()
        shutil.rmtree(root, ignore_errors=True)
    dist.destroy_process_group()


class _Ours:
    def __init__(self, arrays: list[Any], comm: MPI.Intracomm) -> None:
        self._checkpoint = mpistrat.Checkpoint(arrays=dict(enumerate(arrays)))

    def save(self, path: Path) -> Callable[[], bool]:
        self._checkpoint.save(path)
        return (path / "manifest.json").exists

    def restore(self, path: Path) -> None:
        self._checkpoint.restore(path)


class _Torch:
    def __init__(self, arrays: list[Any], comm: MPI.Intracomm) -> None:
        self._state = {str(index): torch.from_numpy(array) for index, array in enumerate(arrays)}

    def save(self, path: Path) -> Callable[[], bool]:
        future: Any = dcp.async_save(self._state, checkpoint_id=path)
        return lambda: future.done() and future.result() is not None

    def restore(self, path: Path) -> None:
        dcp.load(self._state, checkpoint_id=path)


class _Savez:
    def __init__(self, arrays: list[Any], comm: MPI.Intracomm) -> None:
        self._comm, self._arrays = comm, {str(index): array for index, array in enumerate(arrays)}

    def save(self, path: Path) -> Callable[[], bool]:
        if self._comm.rank == 0:
            path.mkdir()
            with (path / "all.npz").open("wb") as file:
                np.savez(file, **self._arrays)
                file.flush()
                os.fsync(file.fileno())
        self._comm.Barrier()
        return lambda: True

    def restore(self, path: Path) -> None:
        with np.load(path / "all.npz") as found:
            for name, array in self._arrays.items():
                array[...] = found[name]


class _Race:
    """All that is timed, in turns, with the same arrays."""

    def __init__(self, comm: MPI.Intracomm, root: Path, arrays: list[Any]) -> None:
        self._comm, self._root, self._arrays = comm, root, arrays
        self._share = np.ones(sum(array.nbytes for array in arrays) // comm.size, np.uint8)
        self._copy = np.zeros_like(self._share)
        memory = np.zeros(self._share.nbytes, np.uint8)
        aligned = memory[-memory.ctypes.data % _ALIGNMENT :]
        self._aligned = aligned[: len(aligned) // _ALIGNMENT * _ALIGNMENT]
        self._square, self._gradient = np.ones((384, 384)), np.ones(1 << 16, np.float32)
        self._savers = {"mpistrat": _Ours, "torch": _Torch, "savez": _Savez}
        self._ready = {name: make(arrays, comm) for name, make in self._savers.items()}
        self._communicator = mpistrat.MultiWorkerMirroredStrategy().extended.communicator

    def run(self, rounds: int) -> None:
        """Print the seconds of each round but for the first."""
        found: dict[str, dict[str, list[float]]] = {}
        for turn in range(rounds + 1):
            for name in ("beside", *self._ready):
                timed = self._beside() if name == "beside" else self._of(name)
                for what, seconds in timed.items():
                    if turn:
                        slowest = self._comm.allreduce(seconds, MPI.MAX)
                        found.setdefault(name, {}).setdefault(what, []).append(slowest)
        if self._comm.rank == 0:
            facts = {"arrays": len(self._arrays), "bytes": sum(array.nbytes for array in self._arrays)}
            print(json.dumps({**facts, "seconds": found}), flush=True)

    def _beside(self) -> dict[str, float]:
        path = self._root / "plain"
        [copy] = slowest_seconds(self._comm, lambda: np.copyto(self._copy, self._share), 1)
        [write] = slowest_seconds(self._comm, lambda: self._write(path), 1)
        return {"copy": copy, "write": write, **self._steps_beside(self._start_plain)}

    def _start_plain(self) -> Callable[[], bool]:
        """Copy this rank's share, and have a thread write it to a new file by one call: what no save can do with less."""
        path = self._root / f"plain-{self._comm.rank}"
        np.copyto(self._aligned, self._share[: len(self._aligned)])

        def write() -> None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            os.write(descriptor, self._aligned)
            os.fsync(descriptor)
            os.close(descriptor)
            path.unlink()

        thread = threading.Thread(target=write)
        thread.start()
        return lambda: not thread.is_alive()

    def _write(self, path: Path) -> None:
        """Write all bytes as the chief, one after the other, and wait until they are durable."""
        if self._comm.rank == 0:
            with path.open("wb", buffering=0) as file:
                for array in self._arrays:
                    data = array.view(np.uint8).data
                    for begin in range(0, len(data), _CHUNK_BYTES):
                        file.write(data[begin : begin + _CHUNK_BYTES])
                os.fsync(file.fileno())
            path.unlink()
        self._comm.Barrier()

    def _of(self, name: str) -> dict[str, float]:
        saver, path = self._ready[name], self._root / name
        for array in self._arrays:
            array += 1
        wanted = [array[-1] for array in self._arrays]
        self._comm.Barrier()
        started = time.perf_counter()
        is_done = saver.save(path)
        waited = time.perf_counter() - started
        while not self._all(is_done()):
            time.sleep(_POLL_SECONDS)
        found = {"wait": waited, "save": time.perf_counter() - started}
        for array in self._arrays:
            array[...] = 0
        self._forget(path)
        [found["restore"]] = slowest_seconds(self._comm, lambda: saver.restore(path), 1)
        assert [array[-1] for array in self._arrays] == wanted, name
        self._remove(path)

        found |= self._steps_beside(lambda: saver.save(path))
        self._remove(path)
        return found

    def _steps_beside(self, start: Callable[[], Callable[[], bool]]) -> dict[str, float]:
        """Return the mean seconds of steps before and after something that ends by itself, and meanwhile."""
        before = self._step_seconds(lambda: False, 50)
        meanwhile = self._step_seconds(start())
        return {"step": (before + self._step_seconds(lambda: False, 50)) / 2, "step meanwhile": meanwhile}

    def _step_seconds(self, is_done: Callable[[], bool], most: int = 1 << 30) -> float:
        """Return the mean seconds of steps until all ranks are done."""
        self._comm.Barrier()
        started = time.perf_counter()
        count, is_over = 0, False
        while count < most and not is_over:
            np.dot(self._square, self._square)
            self._gradient[0] = is_done()
            is_over = self._communicator.all_reduce("sum", self._gradient)[0] == self._comm.size
            count += 1
        return (time.perf_counter() - started) / count

    def _all(self, is_done: bool) -> bool:
        return bool(self._comm.allreduce(is_done, MPI.LAND))

    def _forget(self, path: Path) -> None:
        """Have files read from the disk, not from memory."""
        self._comm.Barrier()
        for each in path.iterdir():
            descriptor = os.open(each, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _remove(self, path: Path) -> None:
        self._comm.Barrier()
        if self._comm.rank == 0:
            shutil.rmtree(path)
        self._comm.Barrier()


if __name__ == "__main__":
    main()
