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
from tests.gpu.evidence import changed_since, collect, run_probe
from tests.gpu.machine import Machine, driver_version
from tests.gpu.probes import PROBES, Goal, Probe
from tests.processes import run_bounded

H200 = Machine(["NVIDIA H200"], {"CuPy": "14.2.0", "NCCL": "2.32.3", "Open MPI": "5.0.11"})
SEVERAL, HOST_IDS, BY_NCCL = (
    "with several ranks on a GPU",
    "with a host id for every rank",
    "strategy 2x2, by nccl inside nodes",
)
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
    done = run_bounded([sys.executable, "-m", "tests.gpu.evidence", "--out", str(out)], 120)
    assert done.returncode == 0, done.stdout + done.stderr
    evidence = json.loads(out.read_text())
    assert evidence["is_complete"]
    assert evidence["machine"]["gpus"] == []
    assert [case["name"] for case in evidence["cases"]] == [probe.name for probe in PROBES]
    ran = {case["name"]: case["figures"]["checks"] for case in evidence["cases"] if case["outcome"] == "ok"}
    assert list(ran) == ON_HOST, done.stdout
    assert min(ran.values()) > 1000
    # whoever adds a probe counts here: one that is lost is not missed by itself
    reasons = Counter(case["reason"] for case in evidence["cases"] if case["outcome"] == "skipped")
    assert reasons == {why: 31}
    assert not changed_since(evidence)
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
        (H200, {"nccl 1x2": "2 ranks with a GPU each need 2 GPUs; there is 1", "nccl 1x4": "4 ranks with a GPU each need "}),
        (
            Machine(["NVIDIA H200"] * 4, H200.versions | {"NCCL": "2.28.9"}),
            dict.fromkeys(
                [*(f"nccl {SEVERAL} {shape}" for shape in ("1x2", "1x4", "2x2")), BY_NCCL, "nccl deadline"],
                "NCCL 2.28.9 lets no two ranks share a GPU; 2.30 does",
            ),
        ),
        (
            Machine(["NVIDIA H200"] * 4, {}, {"NCCL": "no libnccl"}),
            {probe.name: "no libnccl" for probe in PROBES if probe.name.startswith("nccl") or probe.name == BY_NCCL},
        ),
        (
            Machine(["NVIDIA H200"] * 4, {"NCCL": "2.30.7"}, {"MPI": "no MPI", "scikit-learn": "no images"}),
            {probe.name: "no MPI" for probe in PROBES if not probe.name.startswith("timing") or probe.name == "timing call"},
        ),
    ],
    ids=["one GPU", "an old NCCL", "no NCCL", "no MPI"],
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


def test_a_probe_is_judged_by_what_it_writes(program):
    case = run_probe(program("report.write_text('{\"fraction\": 0.5}')", goals=(Goal("fraction", 0.85),)), H200)
    assert (case["outcome"], case["figures"], case["goals"]) == ("ok", {"fraction": 0.5}, {"fraction >= 0.85": False})
    case = run_probe(program("report.write_text('{\"us\": 20}')", goals=(Goal("us", 30, is_upper=True),)), H200)
    assert case["goals"] == {"us <= 30": True}
    case = run_probe(program('report.write_text(\'{"skipped": "planted"}\')'), H200)
    assert (case["outcome"], case["reason"]) == ("skipped", "planted")


def test_a_probe_that_fails_is_told_with_its_last_words(program):
    case = run_probe(program("report.write_text('{\"checks\": 1}'); raise ValueError('planted')"), H200)
    assert case["outcome"] == "failed"
    assert case["reason"].startswith("it ended with 1\n")
    assert case["reason"].endswith("ValueError: planted")
    assert run_probe(program("print('no report')"), H200)["reason"] == "it ended with 0\nno report"


def test_a_probe_that_hangs_is_killed_and_the_rest_goes_on(program, capsys):
    hangs = program("report.write_text('{\"cut'); print('joining', flush=True); time.sleep(60)", seconds=0.7)
    written = []
    begun = time.monotonic()
    collect(H200, [hangs, program("report.write_text('{\"checks\": 1}')")], lambda found: written.append(json.dumps(found)))
    assert time.monotonic() - begun < 30
    assert [len(json.loads(text)["cases"]) for text in written] == [0, 1, 2]
    assert [json.loads(text)["is_complete"] for text in written] == [False, False, True]
    first, second = json.loads(written[-1])["cases"]
    assert first["reason"].startswith("it was killed after 0.7 s\njoining")
    assert (first["outcome"], second["outcome"]) == ("failed", "ok")
    assert "failed  planted_0: it was killed after 0.7 s" in capsys.readouterr().out


def test_what_no_longer_fits_into_the_time_is_left_out(program, monkeypatch):
    monkeypatch.setattr(gpu_evidence, "BUDGET_SECONDS", 50.0)
    [case] = collect(H200, [program("", seconds=60.0)], lambda found: None)["cases"]
    assert (case["outcome"], case["reason"]) == ("skipped", "no time was left: it may take 60 s")


def test_evidence_is_stale_when_the_code_of_the_gpu_has_changed(tmp_path):
    for path in ("device/cuda.py", "device/kernels.cu", "transports/nccl.py", "transports/cuda_aware.py", "transports/mpi.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("as it was")
    evidence = {"sources": gpu_evidence._digests(tmp_path)}
    assert changed_since(evidence, tmp_path) == []
    (tmp_path / "transports/mpi.py").write_text("no GPU's business")
    assert changed_since(evidence, tmp_path) == []
    (tmp_path / "device/kernels.cu").write_text("as it is")
    (tmp_path / "device/new.py").write_text("as it is")
    (tmp_path / "transports/cuda_aware.py").unlink()
    assert changed_since(evidence, tmp_path) == ["device/kernels.cu", "device/new.py", "transports/cuda_aware.py"]
