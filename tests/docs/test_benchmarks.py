"""Every experiment has its table, kept as one file that says how it was measured. That pages are current: see test_pages."""

import re

import pytest

from tests.benchmarks.experiments import EXPERIMENTS
from tests.benchmarks.pages import RESULTS, read_table, with_results, write_table

_TABLE = [["size", "time"], ["8 B", "1 µs"], ["1 KiB", "2 µs"]]


@pytest.mark.parametrize("path", sorted(RESULTS.iterdir()), ids=lambda path: path.stem)
def test_a_table_says_how_it_was_measured(path):
    said, table = read_table(path)
    assert re.match(r"\d{4}-\d\d-\d\d, commit [0-9a-f]{7,12}( with changes)?, python -m tests\.(benchmarks \w+|gpu)", said)
    assert len({len(row) for row in table}) == 1
    assert path.stem.partition("-")[0] in (*EXPERIMENTS, "gpu_h100")


def test_a_page_shows_what_its_mark_chooses_and_rows_not_measured_again_are_kept_where_asked_for(tmp_path):
    write_table(tmp_path / "one.csv", "2026-01-02, commit abc, python x", _TABLE)
    page = "Words.\n<!-- measured: one; size = 1 .*; columns = time -->\nold\n<!-- end -->\nWords.\n"
    table = "| time |\n| --- |\n| 2 µs |\n\n*2026-01-02, commit abc, [all of it](results/one.csv)*\n"
    assert with_results(page, tmp_path) == page.replace("old\n", table)
    path = tmp_path / "one.csv"
    write_table(path, "first", _TABLE)
    write_table(path, "again", [["size", "time"], ["8 B", "1 µs"]], keep=True)
    assert read_table(path) == ("again", _TABLE)
