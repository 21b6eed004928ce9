"""Where files lie that may be thrown away, and how they are written."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

__all__ = ["folder", "parse", "read", "record", "write"]

T = TypeVar("T")

MAX_BYTES = 1 << 24  # what we write is a thousandth of it


def folder() -> Path:
    """Return where they lie: ``$XDG_CACHE_HOME/mpistrat`` or ``~/.cache/mpistrat``.

    Raises
    ------
    RuntimeError
        If there is no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path("~/.cache").expanduser()) / "mpistrat"


def read(path: Path) -> str:
    """Return the text of a file.

    Raises
    ------
    OSError
        If it cannot be read, or is not an ordinary file: a pipe would have nothing to say, and keep who asks waiting.
    ValueError
        If it is larger than any file of this cache, or its bytes are not text.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not an ordinary file")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"it has {status.st_size} bytes, and at most {MAX_BYTES} are read")
        return file.read()


def parse(text: str) -> Any:
    """Return the JSON document that a text holds.

    Raises
    ------
    ValueError
        If it holds none, or one so deep that nobody wrote it with us.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply to be a file of mpistrat") from None


def record(kind: type[T], fields: dict[str, Any]) -> T:
    """Return a dataclass of this kind, made of what a document says.

    Raises
    ------
    TypeError
        If fields are missing or unknown, or one has another type than the class declares: ``"no"`` is true.
    """
    made = kind(**fields)
    for name, expected in get_type_hints(kind).items():
        if type(getattr(made, name)) is not expected:
            raise TypeError(f"{name} must be of type {expected.__name__}, not {getattr(made, name)!r}")
    return made


def write(text: str, path: Path) -> None:
    """Write a file, all at once: who reads it meanwhile finds the old one or the new one.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".new", delete=False) as file:
        file.write(text)
        os.fchmod(file.fileno(), 0o644)  # such a file is its owner's alone at first
    Path(file.name).replace(path)
