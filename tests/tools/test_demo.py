"""``mpistrat demo``: what it shows, what it writes, and what it refuses before it starts anything."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise

import pytest

from mpistrat.checkpoint.files import find_checkpoints, place_of
from mpistrat.tools import cli, demo, run
from tests.processes import TAKES_CTRL_C, run_mpistrat, started

DEMO_SECONDS = 180.0  # it needs a few; this is for a machine that has much else to do


def events_of(folder):
    """Return rank -> lane -> its events in the timeline file."""
    rows = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    lanes = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    found: dict[int, dict[str, list[dict[str, object]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["ph"] == "X":
            found[row["pid"]][lanes[row["pid"], row["tid"]]].append(row)
    return found


def names(events):
    return {event["name"] for event in events}


def assert_is_picture(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20], "big") > 500, "pixels across"


def check_timeline(folder, num_steps):
    """Check that every rank has its phases, one after the other."""
    events = events_of(folder)
    assert sorted(events) == [0, 1, 2, 3]
    for lanes in events.values():
        assert {"copy in", "copy out", "intra reduce_scatter", "intra all_gather"} <= names(lanes["intra"])
        between = [event for lane, row in lanes.items() if lane.startswith("inter") for event in row]
        assert len(names(between)) == 1, "one event for each rail that the rank is on"
        assert len(lanes["step"]) == num_steps
        for lane in (lane for name, lane in lanes.items() if name != "collectives"):  # making a strategy has others inside
            ordered = sorted(lane, key=lambda event: event["ts"])
            assert all(event["dur"] >= 0 for event in ordered)
            assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in pairwise(ordered)), "one after the other"


def test_demo_as_it_comes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")  # which has no ellipsis
    folder = tmp_path / "new" / "folder"
    done = run_mpistrat("demo", "--out", str(folder))
    lines = done.stdout.splitlines()
    assert lines[0].startswith("A network learns handwritten digits on 4 ranks on 2 nodes (2x2), virtual nodes on ")
    table = [line.split() for line in lines[2:5]]
    assert table == [["rail", "0", "rail", "1"], ["node0", "rank", "0", "rank", "1"], ["node1", "rank", "2", "rank", "3"]]
    assert re.search(r"^computed +in host memory \(\w", done.stdout, re.MULTILINE)
    assert re.search(r"^gradients +1\.172 MiB of float32", done.stdout, re.MULTILINE)
    # the gradients are large enough for an algorithm with these phases, whichever auto chooses
    assert re.search(r"^plan +\w+: intra reduce_scatter -> inter all_reduce -> intra all_gather ", done.stdout, re.MULTILINE)
    assert re.search(r"^why +on such nodes \w+ takes ", done.stdout, re.MULTILINE)
    epochs = re.findall(r"^epoch (\d)/8  loss (\d\.\d+) +\d+ images/s +\d+% communicating$", done.stdout, re.MULTILINE)
    assert [int(number) for number, _ in epochs] == list(range(1, 9))
    assert float(epochs[-1][1]) < 0.1 * float(epochs[0][1])
    accuracy = re.search(r"^test accuracy (0\.\d+) after 8 epochs$", done.stdout, re.MULTILINE)
    assert accuracy
    assert float(accuracy[1]) >= 0.95
    for name in ("training.png", "timeline.json"):
        assert str(folder / name) in done.stdout
    assert "https://ui.perfetto.dev" in done.stdout
    assert "\x1b" not in done.stdout, "no terminal, no escape sequences"
    assert_is_picture(folder / "training.png")
    check_timeline(folder, 8 * 12)


@pytest.mark.parametrize(
    ("chosen", "size", "nodes"),
    [("", 4, "2+2"), ("-n 1", 1, "1x1"), ("-n 2", 2, "1+1"), ("-n 5", 5, "3+2"), ("--nodes 3+1", 4, "3+1")],
)
def test_ranks_alone_make_two_nodes(tmp_path, monkeypatch, chosen, size, nodes):
    started, before = [], dict(os.environ)
    monkeypatch.setattr(run, "start", lambda *job: started.append(job) or 7)
    assert cli.main(["demo", "--epochs", "3", "--out", str(tmp_path), *chosen.split()]) == 7
    [(program, num_ranks, shape, variables)] = started
    assert (num_ranks, shape) == (size, nodes)
    assert variables == {"MPISTRAT_TIMELINE": str(tmp_path / "timeline.json")}
    assert os.environ == before, "other jobs of this process have no timeline"
    assert program[:6] == ["-m", "mpistrat.tools.demo", "--width", "0", "--epochs", "3"]


def test_a_demo_that_was_interrupted_goes_on(tmp_path):
    saved = tmp_path / "saved"
    argv = ["demo", "--out", str(tmp_path), "-n", "2", "--checkpoint", str(saved), "--epochs"]
    interrupted = [*TAKES_CTRL_C, sys.executable, "-m", "mpistrat", *argv, "500"]
    with started(interrupted, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + DEMO_SECONDS
        while not find_checkpoints(saved)[2:] and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=DEMO_SECONDS)
    assert process.returncode == 130
    assert re.search(rf"step 1: .* in {saved}/ckpt-00000001, at .*; the step waited ", err)
    last = place_of(find_checkpoints(saved)[-1])[0]
    done = run_mpistrat(*argv, str(last + 1))
    assert f"goes on after epoch {last}, from {saved}" in done.stdout
    assert re.findall(r"^epoch (\d+)/", done.stdout, re.MULTILINE) == [str(last + 1)]
    assert f"after {last + 1} epochs" in done.stdout
    assert_is_picture(tmp_path / "training.png")
    done = run_mpistrat(*argv, str(last))
    assert f"all {last} epochs were in {saved}: test accuracy 0." in done.stdout


def test_missing_packages_are_named_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "start", lambda *job: pytest.fail(f"started {job}"))
    monkeypatch.setattr(demo, "NEEDED", {**demo.NEEDED, "no_such_module": "no-such-package"})
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == ("mpistrat demo: the demo needs no-such-package: pip install '.[demo]' in the checkout\n")
    assert not (tmp_path / "out").exists()
