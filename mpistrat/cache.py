"""The cache of this user: small JSON files, and how they are named, read and written."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from mpistrat.errors import LaunchError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

MAX_BYTES = 1 << 24  # a thousand times the size of the files that we write


def folder() -> Path:
    """Return the cache folder, ``$XDG_CACHE_HOME/mpistrat`` or ``~/.cache/mpistrat``; a LaunchError if there is no home."""
    from platformdirs import user_cache_path

    found = user_cache_path("mpistrat")
    if not found.is_absolute():
        raise LaunchError("there is no home folder for files of mpistrat: set HOME, or XDG_CACHE_HOME")
    return found


def checksum(key: DataclassInstance) -> str:
    """Return eight digits that tell one key from another, for the name of its file."""
    return f"{zlib.crc32(json.dumps(asdict(key)).encode()):08x}"


def read(path: Path) -> Any:
    """Return the JSON document in a file; an OSError for what is no regular file: a pipe could block."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, and at most {MAX_BYTES} are read")
        try:
            return json.load(file)
        except RecursionError:
            raise ValueError("it is nested too deeply to be a file of mpistrat") from None


def record(kind: type[T], fields: dict[str, Any]) -> T:
    """Return a dataclass made of the fields of a JSON document; a TypeError for wrong types: ``"no"`` would count as true."""
    made = kind(**fields)
    for name, expected in get_type_hints(kind).items():
        if type(getattr(made, name)) is not expected:
            raise TypeError(f"{name} must be of type {expected.__name__}, not {getattr(made, name)!r}")
    return made


def write(document: Any, path: Path) -> None:
    """Write a JSON document atomically: a concurrent reader finds either the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".new", delete=False) as file:
        file.write(json.dumps(document, indent=1) + "\n")
        os.fchmod(file.fileno(), 0o644)  # temporary files are created readable by their owner only
    Path(file.name).replace(path)
