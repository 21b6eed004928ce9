"""The evidence of a GPU where there is none: what is left out says why, and what fails or hangs is told and ended."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter

import pytest

from mpistrat.device.cuda import count_visible
from tests.gpu import evidence as gpu_evidence
from tests.gpu.conformance import SUBJECTS
from tests.gpu.evidence import collect, run_probe
from tests.gpu.machine import Machine, driver_version, loaded, states
from tests.gpu.parts import DIFFERS, merged
from tests.gpu.probes import PROBES, Goal, Probe
from tests.processes import run_bounded

H200 = Machine(["NVIDIA H200"], {"CuPy": "14.2.0", "NCCL": "2.32.3", "Open MPI": "5.0.11"})
SEVERAL, HOST_IDS = "with several ranks on a GPU", "with a host id for every rank"
BY_NCCL = (
    "sums of 2 ranks on a GPU that they share",
    "strategy 2x2, by nccl inside nodes",
    "strategy 2x2, by nccl inside nodes and between them",
    "first fault, by nccl",
    "streams 2x2, by nccl",
    "open and close 1x2, by nccl",
    "soak 2x2, by nccl",
)
ON_TWO = "sums of 2 ranks on 2 GPUs"
ON_HOST = ["shared_memory 1x2", "mpi 1x2", "mpi_ring 1x2"]


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Give a function that makes a probe of a program."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def make(text, **arguments):
        name = f"planted_{len(list(tmp_path.glob('*.py')))}"
        (tmp_path / f"{name}.py").write_text(f"import json, pathlib, sys, time\nreport = pathlib.Path(sys.argv[-1])\n{text}\n")
        return Probe(name, "", (name,), (), **arguments)

    return make


def test_without_a_gpu_everything_says_why_it_is_left_out(tmp_path):
    count, why = count_visible()
    if count:
        pytest.skip("there is a GPU: tests/gpu runs all of this")
    out = tmp_path / "new" / "evidence.json"
    done = run_bounded([sys.executable, "-m", "tests.gpu.evidence", "--out", str(out)], 600)
    assert done.returncode == 0, done.stdout + done.stderr
    evidence = json.loads(out.read_text())
    assert evidence["is_complete"]
    assert evidence["machine"]["gpus"] == []
    assert [case["name"] for case in evidence["cases"]] == [probe.name for probe in PROBES]
    ran = {case["name"]: case["figures"]["checks"] for case in evidence["cases"] if case["outcome"] == "ok"}
    assert list(ran) == ON_HOST, done.stdout
    assert min(ran.values()) > 500
    # whoever adds a probe counts here: one that is lost is not missed by itself
    reasons = Counter(case["reason"] for case in evidence["cases"] if case["outcome"] == "skipped")
    assert reasons == {why: 48}
    assert evidence["environment"]["MPISTRAT_STRICT"] == "1"


def test_every_transport_of_a_gpu_is_tried_in_every_shape():
    tried = {probe.name for probe in PROBES if probe.command[0] == "tests.gpu.conformance"}
    alone = {f"{name} {shape}" for name in ("staged", "cuda_ipc", "cuda_aware") for shape in ("1x2", "1x4", "2x2")}
    shared = {f"nccl {way} {shape}" for way in (SEVERAL, HOST_IDS) for shape in ("1x2", "1x4", "2x2")}
    assert tried == {*ON_HOST, *alone, *shared, "nccl 1x1", "nccl 1x2", "nccl 1x4"}
    assert {name.split()[0] for name in tried} == set(SUBJECTS)
    assert len({probe.name for probe in PROBES}) == len(PROBES)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (
            H200,
            dict.fromkeys(("nccl 1x2", ON_TWO), "2 ranks with a GPU each need 2 GPUs; there is 1")
            | {"nccl 1x4": "4 ranks with a GPU each need "},
        ),
        (
            Machine(["NVIDIA H200"] * 4, H200.versions | {"NCCL": "2.28.9"}),
            dict.fromkeys(
                [*(f"nccl {SEVERAL} {shape}" for shape in ("1x2", "1x4", "2x2")), *BY_NCCL, "nccl deadline"],
                "NCCL 2.28.9 lets no two ranks share a GPU; 2.30 does",
            ),
        ),
        (
            Machine(["NVIDIA H200"] * 4, {}, {"NCCL": "no libnccl"}),
            {
                probe.name: "no libnccl"
                for probe in PROBES
                if probe.name.startswith("nccl") or probe.name in (*BY_NCCL, ON_TWO, "overhead")
            },
        ),
        (
            Machine(["NVIDIA H200"] * 4, {"NCCL": "2.30.7"}, {"MPI": "no MPI", "scikit-learn": "no images"}),
            {
                probe.name: "no MPI"
                for probe in PROBES
                if probe.name == "timing call" or not probe.name.startswith(("timing", "sanitizer"))
            },
        ),
        (
            Machine(["NVIDIA H200"] * 4, {"NCCL": "2.30.7"}, {"compute-sanitizer": "no toolkit"}),
            {"sanitizer": "no toolkit"},
        ),
    ],
    ids=["one GPU", "an old NCCL", "no NCCL", "no MPI", "no sanitizer"],
)
def test_a_machine_that_lacks_something_runs_the_rest(machine, expected):
    refusals = {probe.name: probe.refusal(machine) for probe in PROBES if probe.refusal(machine)}
    assert refusals.keys() == expected.keys()
    for name, refusal in refusals.items():
        assert refusal.startswith(expected[name])


def test_the_version_of_the_driver_is_read():
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (root)  Tue\nGCC version: 12.3.0\n"
    )
    assert driver_version(text) == {"NVIDIA driver": "580.159.03"}
    assert driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Jun") == {"NVIDIA driver": "535.54"}
    assert driver_version("") == {}


def test_the_state_of_each_gpu_is_read():
    one, other = states(
        "GPU-1, Default, Disabled, Enabled, 345 MHz, 1980 MHz, 2619 MHz\nGPU-2, Exclusive_Process, [N/A], [N/A], 1, 2, 3\n"
    )
    assert (one["uuid"], one["mig.mode.current"], one["clocks.max.sm"]) == ("GPU-1", "Disabled", "1980 MHz")
    assert other["compute_mode"] == "Exclusive_Process"


def test_the_libraries_that_are_loaded_are_found():
    maps = """7f00-7f01 r--p 00000000 08:01 12 /opt/nvidia/lib/libnccl.so.2
7f01-7f02 r-xp 00001000 08:01 12 /opt/nvidia/lib/libnccl.so.2
7f02-7f03 r--p 00000000 08:01 13 /usr/lib/libcuda.so.580.1
7f03-7f04 r--p 00000000 08:01 14 /opt/mpi/libmpi.so.40.40.8
7f04-7f05 r--p 00000000 08:01 15 /opt/mpi/libmpi_mpifh.so.40
7f05-7f06 rw-p 00000000 00:00 0
"""
    assert loaded(maps) == {
        "libnccl": "/opt/nvidia/lib/libnccl.so.2",
        "libcuda": "/usr/lib/libcuda.so.580.1",
        "libmpi": "/opt/mpi/libmpi.so.40.40.8",
    }


def test_four_ranks_of_nccl_have_more_time():
    longer = {probe.name for probe in PROBES if probe.num_ranks == 4 and "nccl" in probe.name}
    assert len(longer) == 9
    assert min(probe.seconds for probe in PROBES if probe.name in longer) >= 120
    assert max(probe.seconds for probe in PROBES) < gpu_evidence.BUDGET_SECONDS


def test_a_probe_is_judged_by_what_it_writes(program):
    case = run_probe(program("report.write_text('{\"fraction\": 0.5}')", goals=(Goal("fraction", 0.85),)), H200)
    assert (case["outcome"], case["figures"], case["goals"]) == ("ok", {"fraction": 0.5}, {"fraction >= 0.85": False})
    assert case["stderr"] == ""
    case = run_probe(
        program(
            "report.write_text('{\"us\": 20}'); print('NCCL WARN', file=sys.stderr)", goals=(Goal("us", 30, is_upper=True),)
        ),
        H200,
    )
    assert (case["goals"], case["stderr"]) == ({"us <= 30": True}, "NCCL WARN")
    case = run_probe(program('report.write_text(\'{"skipped": "planted"}\')'), H200)
    assert (case["outcome"], case["reason"]) == ("skipped", "planted")


def test_a_probe_that_fails_is_told_with_its_last_words(program):
    case = run_probe(program("report.write_text('{\"checks\": 1}'); raise ValueError('planted')"), H200)
    assert case["outcome"] == "failed"
    assert case["reason"].startswith("it ended with 1\n")
    assert case["reason"].endswith("ValueError: planted")
    assert run_probe(program("print('no report')"), H200)["reason"] == "it ended with 0\nno report"


def test_a_probe_that_hangs_is_killed_and_the_rest_goes_on(program, capsys, monkeypatch):
    # two more processes for each core than there are: it has twice its time, or more
    busy = os.getloadavg()[0] + 2 * os.cpu_count()
    monkeypatch.setattr("os.getloadavg", lambda: (busy,) * 3)
    hangs = program("report.write_text('{\"cut'); print('joining', flush=True); time.sleep(600)", seconds=1.0)
    written = []
    begun = time.monotonic()
    collect(H200, [hangs, program("report.write_text('{\"checks\": 1}')")], lambda found: written.append(json.dumps(found)))
    assert time.monotonic() - begun < 300
    assert [len(json.loads(text)["cases"]) for text in written] == [0, 1, 2]
    assert [json.loads(text)["is_complete"] for text in written] == [False, False, True]
    first, second = json.loads(written[-1])["cases"]
    limit = busy / os.cpu_count()
    assert first["reason"].startswith(f"it was killed after {limit:g} s\njoining")
    assert (first["outcome"], second["outcome"]) == ("failed", "ok")
    assert f"failed  planted_0: it was killed after {limit:g} s" in capsys.readouterr().out


def test_what_no_longer_fits_into_the_time_is_left_out(program, monkeypatch):
    monkeypatch.setattr(gpu_evidence, "BUDGET_SECONDS", 50.0)
    [case] = collect(H200, [program("", seconds=60.0)], lambda found: None)["cases"]
    assert (case["outcome"], case["reason"]) == ("skipped", "no time was left: it may take 60 s")


def part(at, cases, **sources):
    """Return what a run wrote at a time; cases are pairs of a name and an outcome."""
    named = [{"name": name, "at": f"2026-11-22T{at}", "outcome": outcome, "seconds": 1} for name, outcome in cases]
    return {"date": "2026-11-22", "commit": at, "seconds": 10, "is_complete": True, "sources": sources, "cases": named}


def test_parts_are_joined_and_the_newer_case_wins(tmp_path):
    late = part("12", [("soak", "failed"), ("staged", "skipped")], **{"a.py": "1", "b.py": "2"})
    early = part("11", [("staged", "ok"), ("soak", "ok"), ("ipc", "skipped")], **{"a.py": "1", "b.py": "1", "c.py": "1"})
    found = merged([late, early], ["ipc", "staged", "soak", "unheard"])
    assert [(case["name"], case["outcome"], case["part"]) for case in found["cases"]] == [
        ("ipc", "skipped", 0),
        ("staged", "ok", 0),
        ("soak", "failed", 1),
    ]
    assert [one["commit"] for one in found["parts"]] == ["11", "12"]
    assert (found["commit"], found["seconds"], found["is_complete"]) == ("12", 20, False)
    assert found["sources"] == {"a.py": "1", "b.py": DIFFERS, "c.py": DIFFERS}
    again = merged([part("13", [("unheard", "ok")], **{"a.py": "1"}), found], ["ipc", "staged", "soak", "unheard"])
    assert [(case["name"], case["part"]) for case in again["cases"]] == [("ipc", 0), ("staged", 0), ("soak", 1), ("unheard", 2)]
    assert again["is_complete"]
    for name, evidence in (("late", late), ("early", early)):
        (tmp_path / name).write_text(json.dumps(evidence))
    out = tmp_path / "whole.json"
    assert gpu_evidence.main(["--out", str(out), "--merge", str(tmp_path / "late"), str(tmp_path / "early")]) == 0
    assert len(json.loads(out.read_text())["cases"]) == 3


def test_a_name_that_no_probe_has_is_an_error(tmp_path, capsys):
    """A slip of the pen must not look like a run in which all was well."""
    with pytest.raises(SystemExit):
        gpu_evidence.main(["--out", str(tmp_path / "gpu.json"), "--only", "sanitizer", "ipc 2x1"])
    assert "no probe has 'ipc 2x1' in its name; timing pack, " in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize("text", ["ipc 1x2", "strategy 1x2", "timing", SEVERAL, "deadline", "soak", "streams", "interop"])
def test_the_names_of_a_visit_are_those_of_probes(text):
    assert any(text in probe.name for probe in PROBES)
