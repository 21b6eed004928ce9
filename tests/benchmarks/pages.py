"""The pages of docs/benchmarks: the words are written by hand, what stands between two marks follows from the results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.benchmarks.experiments import find, page_of

__all__ = ["DOCS", "markdown_table", "publish", "show", "with_results"]

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
_PART = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def publish(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write a result, its figure, and the page with its table, which is begun where there is none; return the files."""
    name = result["experiment"]
    results, image = folder / "results" / f"{name}.json", folder / "images" / f"{name}.png"
    page = folder / f"{page_of(name)}.md"
    for path in (results, image):
        path.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(result, indent=1) + "\n")
    find(name).draw(result, image)
    text = page.read_text() if page.exists() else f"# {name}\n\n<!-- measured: {name} -->\n<!-- end -->\n"
    page.write_text(with_results(text, folder))
    return [results, image, page]


def with_results(text: str, folder: Path = DOCS) -> str:
    """Return a page in which the parts between the marks follow from the results in the folder."""

    def measured(match: re.Match[str]) -> str:
        results = folder / "results" / f"{match[2]}.json"
        if not results.exists():
            return f"{match[1]}Not measured yet: `python -m tests.benchmarks {match[2]}` fills this in.\n{match[3]}"
        result = json.loads(results.read_text())
        return f"{match[1]}{show(result)}\n![{_caption(match[2])}](images/{match[2]}.png)\n{match[3]}"

    return _PART.sub(measured, text)


def show(result: dict[str, Any]) -> str:
    """Return what is said of a result in Markdown: the circumstances, the tables."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    missing = "".join(f" Left out: {name} ({reason})." for name, reason in result["missing"].items())
    return (
        f"Measured on {result['date']} by `{result['command']}`, in {result['seconds']} s, on {result['machine']}; {versions}; "
        f"commit {result['commit']}.{missing}\n\n{find(result['experiment']).table(result)}"
    )


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _caption(name: str) -> str:
    return (find(name).__doc__ or name).partition("\n")[0].rstrip(".")
