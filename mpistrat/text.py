"""Texts of sizes, times, tables and ranks, and ranks by what they have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_BINARY = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def format_bytes(num_bytes: int) -> str:
    """Return a size such as ``64 MiB``, ``1.5 KiB`` or ``8 B``."""
    for unit, name in _BINARY:
        if num_bytes >= 0.9995 * unit:  # what four digits would show as 1024 of the smaller unit
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"


def format_seconds(seconds: float) -> str:
    """Return a time such as ``1.2 s``, ``4.04 ms`` or ``17 µs``."""
    for unit, name in _TIMES:
        if seconds >= 0.9995 * unit:  # what three digits would show as 1000 of the smaller unit
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def format_elapsed(seconds: float) -> str:
    """Return how long something has taken so far, such as ``0.4 s``, ``31 s`` or ``2 h 5 min``."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes} min {whole % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_count(count: int, noun: str) -> str:
    """Return a number of things, such as ``1 rank`` or ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows of equal length as lines with aligned columns: those in `right` to the right, the others to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def ranks_by(pairs: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Return from pairs of a rank and a value the ranks that share each value."""
    ranks: dict[T, list[int]] = {}
    for rank, value in pairs:
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spans_text(ranks)}"


def spans_text(ranks: Sequence[int]) -> str:
    """Return ``3`` or ``0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def parse_spans(text: str) -> list[range]:
    """Return the spans of what `spans_text` returned."""
    ends = [span.partition("-") for span in text.split(", ") if span]
    return [range(int(first), int(last or first) + 1) for first, _, last in ends]
