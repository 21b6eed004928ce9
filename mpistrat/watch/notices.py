"""Notices: a watcher posts for the ranks of its host what they wait for in vain: a deadlock, a mismatch, a failed rank."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mpistrat.errors import AgreementError, CollectiveError, UnavailableError
from mpistrat.watch.states import Key

__all__ = ["Notice", "Notices"]

_PREFIX = "verdict-"


@dataclass(frozen=True)
class Notice:
    """A deadlock, a mismatch of calls, or a rank that has failed.

    Attributes
    ----------
    communicator, number : int
        Which collective: of several notices about one the first counts.
    text : str
        The message of the error.
    is_mismatch : bool
        Whether ranks made different calls; otherwise one has ended or failed.
    is_for_all : bool
        Whether ranks in any collective raise it; otherwise only those in this one or a later one of its communicator, because
        others may go on.
    """

    communicator: int
    number: int
    text: str
    is_mismatch: bool
    is_for_all: bool = True

    def concerns(self, inside: Collection[Key]) -> Key | None:
        """Return the collective, of those that a rank is inside, that cannot end because of this; None if there is none."""
        return next((key for key in inside if key[0] == self.communicator and key[1] >= self.number), None)

    @property
    def name(self) -> str:
        """The name of its file, after the prefix."""
        return f"{self.communicator}-{self.number}"

    def error(self) -> CollectiveError:
        """Return the error to raise."""
        return AgreementError(self.text) if self.is_mismatch else UnavailableError(self.text)


class Notices:
    """The notices of a job on one host.

    Parameters
    ----------
    job : Path
        Its folder; if that does not exist, notices stay in this process.
    """

    def __init__(self, job: Path) -> None:
        self._job = job
        self._own: list[Notice] = []
        self._ignored: set[str] = set()
        self._failed: set[int] = set()

    def post(self, notice: Notice) -> None:
        """Post a notice for the ranks of this host."""
        self._own.append(notice)
        path = self._job / f"{_PREFIX}{notice.name}"
        new = path.with_name(f".{path.name}-{os.getpid()}")
        with suppress(OSError):
            new.write_text(json.dumps(asdict(notice)))
            with suppress(FileExistsError):
                os.link(new, path)
            new.unlink()

    def first(self, inside: Collection[Key]) -> Notice | None:
        """Return the first notice for a rank inside these collectives that is not ignored; None if there is none."""
        return next((notice for notice in self._all() if notice.is_for_all or notice.concerns(inside)), None)

    def dismiss(self, communicator: int) -> None:
        """Ignore all notices, also later ones, about a communicator that has failed on this rank."""
        self._failed.add(communicator)

    def ignore(self) -> None:
        """Ignore all notices posted so far."""
        self._ignored |= {path.name.removeprefix(_PREFIX) for path in self._paths()} | {notice.name for notice in self._own}

    def _all(self) -> Iterator[Notice]:
        for path in self._paths():
            with suppress(OSError, ValueError, TypeError):
                yield Notice(**json.loads(path.read_text()))
        yield from (notice for notice in self._own if self._counts(notice.name))

    def _paths(self) -> list[Path]:
        found = sorted(self._job.glob(f"{_PREFIX}*"))
        return [path for path in found if self._counts(path.name.removeprefix(_PREFIX))]

    def _counts(self, name: str) -> bool:
        return name not in self._ignored and int(name.partition("-")[0]) not in self._failed
