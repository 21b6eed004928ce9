"""The programs that the evidence of a GPU starts, on CPUs: they run, and a wrong result ends them."""

import json
import sys

import pytest

import mpistrat
from tests.gpu import training_pair, verbs_rank
from tests.processes import run_bounded
from tests.reference import of_verb

SECONDS = 120.0


def test_a_wrong_sum_is_told(monkeypatch):
    wrong = lambda verb, rows, place, rank, op: (of_verb(verb, rows, place, rank, op)[0] + (op == "MEAN"), None)  # noqa: E731
    monkeypatch.setattr(verbs_rank, "of_verb", wrong)
    strategy = mpistrat.OneDeviceStrategy("cpu:0")
    with pytest.raises(AssertionError, match=r"all_reduce\(mean, float32\), call 0: got float32 \(\), and not what NumPy"):
        strategy.run(verbs_rank._try_all, args=(strategy,))


def test_two_trainings_are_compared(tmp_path):
    report = tmp_path / "report.json"
    argv = [sys.executable, "-m", "tests.gpu.training_pair", "2", "2x1", "cpu,cpu"]
    done = run_bounded([*argv, "--report", str(report)], SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(report.read_text())
    assert figures["largest_difference"] < 1e-6
    assert figures["accuracy"] == pytest.approx(figures["accuracy_of_other"], abs=0.02)


def test_trainings_that_part_are_told():
    one = {"losses": [2.0, 1.0], "accuracy": 0.9}
    assert training_pair.compare(one, one)["largest_difference"] == 0
    assert training_pair.compare({**one, "losses": [2.0, 1.5]}, one)["largest_difference"] == 0.5
    with pytest.raises(ValueError, match="shorter"):
        training_pair.compare(one, {**one, "losses": [2.0]})
