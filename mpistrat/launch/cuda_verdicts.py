"""The cache of CUDA-awareness: a verdict for each MPI library, in one file each."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mpistrat import cache

__all__ = ["Library", "Verdict", "keep", "kept_for", "kept_verdicts"]


@dataclass(frozen=True)
class Library:
    """An MPI library and a GPU: everything that the verdict depends on.

    Attributes
    ----------
    path, version : str
        The path of the library, and its version string.
    modified : int
        Modification time of its file, in nanoseconds.
    shaped_by : str
        Environment variables that affect how it transfers messages.
    gpu : str
        The name of the GPU, such as ``NVIDIA H200``.
    """

    path: str
    version: str
    modified: int
    shaped_by: str = ""
    gpu: str = ""

    @property
    def file_name(self) -> str:
        """The name of its cache file."""
        return f"{cache.checksum(self)}.json"


@dataclass(frozen=True)
class Verdict:
    """Whether device memory is passed to MPI directly, and why.

    Attributes
    ----------
    is_aware : bool
        Whether it is.
    reason : str
        How this was found out.
    is_final : bool
        Whether it may be cached, so that the next job need not probe again.
    is_setting : bool
        Whether the user has set it with MPISTRAT_MPI_GPU.
    """

    is_aware: bool
    reason: str
    is_final: bool = True
    is_setting: bool = False


def kept_for(library: Library) -> Verdict | None:
    """Return the verdict that an earlier job has cached for a library; None if there is none."""
    try:
        found = _read(_folder() / library.file_name)
    except RuntimeError:  # there is no home folder
        return None
    return found[1] if found is not None and found[0] == library else None


def kept_verdicts() -> Iterator[tuple[Library, Verdict, str]]:
    """Yield the cached verdicts of earlier jobs of this user: library, verdict and date."""
    try:
        files = sorted(_folder().glob("*.json"))
    except RuntimeError:  # there is no home folder
        return
    for path in files:
        found = _read(path)
        if found is not None:
            yield found


def keep(library: Library, verdict: Verdict) -> None:
    """Cache a verdict for later jobs, if the cache folder can be written."""
    document = {"library": asdict(library), "verdict": asdict(verdict), "date": datetime.date.today().isoformat()}
    try:
        cache.write(document, _folder() / library.file_name)
    except (OSError, RuntimeError):
        return  # the next job probes again


def _read(path: Path) -> tuple[Library, Verdict, str] | None:
    try:
        document = cache.read(path)
        library, verdict = cache.record(Library, document["library"]), cache.record(Verdict, document["verdict"])
        return library, verdict, str(document["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the library is probed again, and the file is overwritten


def _folder() -> Path:
    return cache.folder() / "cuda-aware"
