"""The probes of a GPU where there is none: what is left out says why, and what fails or hangs is told and ended."""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.gpu.conformance import SUBJECTS
from tests.gpu.machine import Machine, driver_version
from tests.gpu.probes import PROBES, Probe

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


@pytest.mark.parametrize("name", ON_HOST)
def test_without_a_gpu_those_of_host_memory_run(name):
    [probe] = [probe for probe in PROBES if probe.name == name]
    assert not probe.refusal(Machine(missing={"GPU": "no GPU"}))
    assert probe.run()["checks"] > 500


def test_without_a_gpu_all_others_say_why_they_are_left_out():
    refusals = [probe.refusal(Machine(missing={"GPU": "no GPU"})) for probe in PROBES]
    # whoever adds a probe counts here: one that is lost is not missed by itself
    assert (refusals.count("no GPU"), refusals.count("")) == (48, len(ON_HOST))


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


def test_four_ranks_of_nccl_have_more_time():
    longer = {probe.name for probe in PROBES if probe.num_ranks == 4 and "nccl" in probe.name}
    assert len(longer) == 9
    assert min(probe.seconds for probe in PROBES if probe.name in longer) >= 120


def test_a_probe_is_judged_by_what_it_writes(program):
    probe = program("report.write_text('{\"fraction\": 0.5}')", least={"fraction": 0.85})
    assert (probe.run(), probe.missed({"fraction": 0.5}), probe.missed({"fraction": 0.9})) == (
        {"fraction": 0.5},
        ["fraction >= 0.85"],
        [],
    )
    probe = program("", most={"us": 30})
    assert (probe.missed({"us": 20}), probe.missed({"us": 40})) == ([], ["us <= 30"])


def test_a_probe_that_fails_is_told_with_its_last_words(program):
    with pytest.raises(AssertionError, match=r"(?s)it ended with 1\n.*ValueError: planted"):
        program("report.write_text('{\"checks\": 1}'); raise ValueError('planted')").run()
    with pytest.raises(AssertionError, match="it ended with 0\nno report"):
        program("print('no report')").run()


def test_a_probe_that_hangs_is_killed(program, monkeypatch):
    # two more processes for each core than there are: it has twice its time, or more
    busy = os.getloadavg()[0] + 2 * os.cpu_count()
    monkeypatch.setattr("os.getloadavg", lambda: (busy,) * 3)
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=rf"it was killed after {busy / os.cpu_count():g} s\njoining"):
        program("report.write_text('{\"cut'); print('joining', flush=True); time.sleep(600)", seconds=1.0).run()
    assert time.monotonic() - begun < 300
