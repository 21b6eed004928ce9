"""Mistakes to plant in the library, one at a time, and for each a test that must find it; `planted.txt` holds them."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mistake(NamedTuple):
    """A text of a file below mpistrat/, what replaces it, and what pytest is told to run."""

    file: str
    old: str
    new: str
    test: str


def mistakes() -> list[Mistake]:
    """Read the mistakes: a file, lines that begin with ``- `` (the old text), ``+ `` (the new one) and ``? `` (the test)."""
    blocks = [block.splitlines() for block in Path(__file__).with_name("planted.txt").read_text().strip().split("\n\n")]
    return [
        Mistake(block[0], *("\n".join(line[2:] for line in block[1:] if line.startswith(kind)) for kind in "-+?"))
        for block in blocks
    ]
