"""Where files lie that may be thrown away, and how they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["folder", "write"]


def folder() -> Path:
    """Return where they lie: ``$XDG_CACHE_HOME/mpistrat`` or ``~/.cache/mpistrat``.

    Raises
    ------
    RuntimeError
        If there is no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path("~/.cache").expanduser()) / "mpistrat"


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
    Path(file.name).chmod(0o644)  # such a file is its owner's alone at first
    Path(file.name).replace(path)
