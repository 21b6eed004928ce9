"""Every experiment has its page, and nothing but a whole run of it is shown there. That tables are current: see test_pages."""

from __future__ import annotations

import json

from tests.benchmarks.experiments import EXPERIMENTS, find, page_of
from tests.benchmarks.pages import DOCS, with_results
from tests.docs.pages import links


def test_every_experiment_has_a_page_and_a_row_in_the_index():
    index = links((DOCS / "index.md").read_text())
    for name in EXPERIMENTS:
        page = f"{page_of(name)}.md"
        assert f"<!-- measured: {name} -->\n" in (DOCS / page).read_text(), name
        assert page in index, f"docs/benchmarks/index.md does not link {page}"


def test_every_experiment_is_captioned_and_can_be_tabulated_and_drawn():
    for name in EXPERIMENTS:
        module = find(name)
        assert (module.__doc__ or "").partition("\n")[0].endswith("."), name
        assert all(callable(getattr(module, function, None)) for function in ("run", "table", "draw")), name


def test_what_is_shown_is_whole_runs_of_experiments_that_there_are():
    for path in DOCS.glob("results/*.json"):
        result = json.loads(path.read_text())
        assert path.stem == result["experiment"]
        assert path.stem in EXPERIMENTS, path
        assert not result["quick"], path
        assert (DOCS / "images" / f"{path.stem}.png").exists(), path


def test_only_what_stands_between_the_marks_is_replaced(tmp_path):
    text = "# A\n\nWords.\n<!-- measured: one -->\nold\n<!-- end -->\nWords.\n"
    assert with_results(text, tmp_path) == text.replace(
        "old", "Not measured yet: `python -m tests.benchmarks one` fills this in."
    )
