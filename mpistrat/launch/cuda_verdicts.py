"""What was found of MPI libraries and the memory of GPUs: a verdict for each library, in a file of its own."""

from __future__ import annotations

import datetime
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mpistrat import cache

__all__ = ["Library", "Verdict", "keep", "kept_for", "kept_verdicts"]


@dataclass(frozen=True)
class Library:
    """An MPI library and a GPU, as far as an answer depends on them.

    Attributes
    ----------
    path, version : str
        Where it lies, and what it calls itself.
    modified : int
        When it was installed: nanoseconds of its file.
    shaped_by : str
        Variables of the environment that change how it moves bytes.
    gpu : str
        Whose memory it is to move, such as ``NVIDIA H200``.
    """

    path: str
    version: str
    modified: int
    shaped_by: str = ""
    gpu: str = ""

    @property
    def file_name(self) -> str:
        """A name of its own for each."""
        return f"{zlib.crc32(json.dumps(asdict(self)).encode()):08x}.json"


@dataclass(frozen=True)
class Verdict:
    """Whether MPI is handed device memory, and why.

    Attributes
    ----------
    is_aware : bool
        Whether it is.
    reason : str
        Who said so.
    is_final : bool
        Whether the next job need not ask again.
    is_setting : bool
        Whether nobody was asked, because the user has said.
    """

    is_aware: bool
    reason: str
    is_final: bool = True
    is_setting: bool = False


def kept_for(library: Library) -> Verdict | None:
    """Return what an earlier job has found of a library; None where none has."""
    try:
        found = _read(_folder() / library.file_name)
    except RuntimeError:  # there is no home folder
        return None
    return found[1] if found is not None and found[0] == library else None


def kept_verdicts() -> Iterator[tuple[Library, Verdict, str]]:
    """Yield what earlier jobs of this user have found: the library, the verdict and the date."""
    try:
        files = sorted(_folder().glob("*.json"))
    except RuntimeError:  # there is no home folder
        return
    for path in files:
        found = _read(path)
        if found is not None:
            yield found


def keep(library: Library, verdict: Verdict) -> None:
    """Let later jobs know what was found of a library, if that can be written."""
    document = {"library": asdict(library), "verdict": asdict(verdict), "date": datetime.date.today().isoformat()}
    try:
        cache.write(json.dumps(document, indent=1) + "\n", _folder() / library.file_name)
    except (OSError, RuntimeError):
        return  # the next job asks again


def _read(path: Path) -> tuple[Library, Verdict, str] | None:
    try:
        document = cache.parse(cache.read(path))
        library, verdict = cache.record(Library, document["library"]), cache.record(Verdict, document["verdict"])
        return library, verdict, str(document["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is asked again, and written anew


def _folder() -> Path:
    return cache.folder() / "cuda-aware"
