"""Neighbours: the ranks of a job on this host, read from their record files; and processes of the job without one."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from mpistrat.launch import environment, process
from mpistrat.watch import folder
from mpistrat.watch.reader import RankFile
from mpistrat.watch.states import Key, RankState, look

__all__ = ["Neighbours", "absent"]


class Neighbours:
    """Reads the record files of a job.

    Parameters
    ----------
    job : Path
        Its folder.
    own : RankFile, optional
        The record of this process, which exists even if the folder does not.
    """

    def __init__(self, job: Path, own: RankFile | None = None) -> None:
        self.job, self._own = job, own
        self._files: dict[str, tuple[int, RankFile]] = {}

    def files(self) -> list[RankFile]:
        """Return the files of the ranks of this host, in rank order."""
        found: dict[str, tuple[int, RankFile]] = {}
        with suppress(OSError):
            for entry in os.scandir(self.job):
                if not entry.name.startswith("rank-"):
                    continue
                known = self._files.get(entry.name)
                with suppress(OSError, ValueError):
                    same = known is not None and known[0] == entry.inode()
                    found[entry.name] = known if known and same else (entry.inode(), RankFile.open(Path(entry.path)))
        # a rank that has ended removes its file; its last contents stay mapped
        self._files |= found
        files = {file.rank: file for _, file in self._files.values()}
        if self._own is not None:
            files[self._own.rank] = self._own
        return [files[rank] for rank in sorted(files)]

    def states(self, wanted: Iterable[Key] = ()) -> tuple[list[RankState], set[Key]]:
        """Return the states of the ranks of this host, and the keys that were looked up: those they wait in, and `wanted`."""
        files = self.files()
        keys = {*wanted}
        for file in files:
            keys |= {(record.communicator, record.number) for record in file.inside()}
        return [look(file, keys) for file in files], keys


def absent(job: Path, ranks: Collection[int]) -> list[RankState]:
    """Return the processes of this host that were started as these ranks of the job, and have no record file.

    They are found by their launcher's variables; of several the newest counts, because a wrapper script precedes the program.
    """
    found: dict[int, RankState] = {}
    for entry in Path("/proc").iterdir():
        seen = process.find(int(entry.name)) if entry.name.isdigit() else None
        variables = seen.environment() if seen else None
        if seen is None or not variables:
            continue
        row = next((row for row in environment.LAUNCHERS if row.started(variables)), None)
        text = variables[row.rank] if row else ""
        if not text.isdigit() or int(text) not in ranks or folder.job_name(variables, seen.pid) != job.name:
            continue
        before = found.get(int(text))
        if before is None or before.pid < seen.pid:
            state = "stopped" if seen.is_stopped else "absent"
            found[int(text)] = RankState(int(text), os.uname().nodename, seen.pid, state, program=_program(seen.pid))
    return [found[rank] for rank in sorted(found)]


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
