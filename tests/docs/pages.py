"""The written pages, taken apart: code blocks, commands, links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^ *```(?P<language>\w*)$")
_RANKS = re.compile(r"the same on (?P<ranks>[\d, ]+ and \d+) ranks:$")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line it starts on, and what is in it."""

    language: str
    line: int
    text: str
    # on how many ranks it prints the same, where the line above says so: ``the same on 1, 2 and 3 ranks:``
    ranks: tuple[int, ...] = ()

    @property
    def file_name(self) -> str:
        """The file that this block shows, where its first line is a comment with a name: ``# train.py``."""
        match = re.match(r"# (\w+\.py)\n", self.text)
        return match[1] if match else ""

    def commands(self) -> list[Command]:
        """Return the lines behind ``$``, each with the output shown below it."""
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not parts[0].strip(), f"line {self.line}: a console block starts with a command"
        return [Command(*part.partition("\n")[::2]) for part in parts[1:]]


@dataclass(frozen=True)
class Command:
    """A command and the output that the page shows; an empty text shows none.

    In the output ``…`` stands for any text in a line, and a line of three dots for any lines.
    """

    line: str
    output: str

    def on(self, num_ranks: int) -> Command:
        """Return the command that runs on another number of ranks."""
        changed, count = re.subn(r"^mpistrat run -n \d+", f"mpistrat run -n {num_ranks}", self.line)
        assert count, f"not a command for any number of ranks: {self.line}"
        return Command(changed, self.output)

    def matches(self, printed: str) -> bool:
        """Return whether a command that printed this did what the page shows."""
        if not self.output.strip():
            return True
        pattern = re.escape(_stripped(self.output)).replace("…", ".*")
        pattern = re.sub(r"^\\\.\\\.\\\.\\?\n", r"(?:.*\\n)*?", pattern, flags=re.MULTILINE)
        return re.fullmatch(pattern, _stripped(printed)) is not None


def pages() -> list[Path]:
    """Return every page that is written for readers."""
    return [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
        *sorted(ROOT.glob("slurm/*.md")),
        *sorted(ROOT.glob("docs/**/*.md")),
    ]


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    language, start, inside, above = "", 0, list[str](), ""
    for number, line in enumerate(text.splitlines(), 1):
        match = _FENCE.match(line)
        if match and not start:
            language, start, inside = match["language"], number, []
        elif match:
            found.append(Block(language, start, "".join(f"{line}\n" for line in inside), _ranks(above)))
            start, above = 0, ""
        elif start:
            inside.append(line)
        else:
            above = line.strip() or above
    assert not start, f"the block that begins in line {start} has no end"
    return found


def links(text: str) -> list[str]:
    return [match["target"] for line in _prose(text) for match in _LINK.finditer(line)]


def _ranks(line: str) -> tuple[int, ...]:
    match = _RANKS.search(line)
    return tuple(int(number) for number in re.findall(r"\d+", match["ranks"])) if match else ()


def _prose(text: str) -> Iterator[str]:
    fenced = False
    for line in text.splitlines():
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield line


def _stripped(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())
