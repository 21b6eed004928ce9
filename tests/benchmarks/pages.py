"""The results: one small table each in docs/benchmarks/results; pages show them, or parts of them, between two marks."""

import csv
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from mpistrat.text import format_seconds

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "results"
Table = list[list[str]]  # the first row has the heads
_PART = re.compile(r"(<!-- measured: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def spread(seconds: Sequence[float]) -> str:
    """Return the median of some times, with the least and the most of them."""
    middle, best, worst = map(format_seconds, (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{middle} ({best} to {worst})"


def write_table(path: Path, said: str, table: Table, keep: bool = False) -> None:
    """Write a table; with ``keep``, rows of the old one whose first two cells are not in the new one stay."""
    if keep and path.exists():
        measured = {tuple(row[:2]) for row in table}
        table = [*table, *(row for row in read_table(path)[1] if tuple(row[:2]) not in measured)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"# {said}\n")
        csv.writer(file, lineterminator="\n").writerows(table)


def read_table(path: Path) -> tuple[str, Table]:
    """Return how a table was measured, and the table."""
    first, *lines = path.read_text().splitlines()
    return first.removeprefix("# "), list(csv.reader(lines))


def with_results(text: str, folder: Path = RESULTS) -> str:
    """Return a page in which the tables between the marks follow from the results in the folder.

    A mark has the name of a table, and may choose rows and columns: ``one_host; placement = block; columns = size, mpistrat``.
    """

    def measured(match: re.Match[str]) -> str:
        name, *choices = match[2].split("; ")
        said, table = read_table(folder / f"{name}.csv")
        for choice in choices:
            column, _, wanted = choice.partition(" = ")
            table = _columns(table, wanted.split(", ")) if column == "columns" else _rows(table, column, wanted)
        date, commit, *_ = said.split(", ")
        return f"{match[1]}{markdown(table)}\n*{date}, {commit}, [all of it](results/{name}.csv)*\n{match[3]}"

    return _PART.sub(measured, text)


def markdown(table: Table) -> str:
    heads, *rows = table
    return "".join(f"| {' | '.join(line)} |\n" for line in [heads, ["---"] * len(heads), *rows])


def _columns(table: Table, names: list[str]) -> Table:
    return [[row[table[0].index(name)] for name in names] for row in table]


def _rows(table: Table, column: str, wanted: str) -> Table:
    heads, *rows = table
    return [heads, *(row for row in rows if re.fullmatch(wanted, row[heads.index(column)]))]
