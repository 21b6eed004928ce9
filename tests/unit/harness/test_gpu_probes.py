"""What gathers evidence on a GPU, where there is none: what is left out says why; what fails, hangs or overlooks is told."""

import os
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.gpu import sanitizer, timings
from tests.gpu.machine import Machine
from tests.gpu.on_host import HostKernels
from tests.gpu.probes import PROBES, Probe
from tests.gpu.stand_in import StandInDevice
from tests.gpu.timings import TIMINGS, Sizes

H200 = Machine(["NVIDIA H200"], {"CuPy": "14.2.0", "NCCL": "2.32.3", "Open MPI": "5.0.11"})
OLD_NCCL = replace(H200, versions={"NCCL": "2.28.9"})


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Give a function that makes a probe of a program."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def make(text, **arguments):
        name = f"planted_{len(list(tmp_path.glob('*.py')))}"
        (tmp_path / f"{name}.py").write_text(f"import json, pathlib, sys, time\nreport = pathlib.Path(sys.argv[-1])\n{text}\n")
        return Probe(name, (name,), (), **arguments)

    return make


def test_without_a_gpu_all_say_why_they_are_left_out():
    refusals = [probe.refusal(Machine(missing={"GPU": "no GPU"})) for probe in PROBES]
    # whoever adds a probe counts here: one that is lost is not missed by itself
    assert refusals == ["no GPU"] * 65


@pytest.mark.parametrize(
    ("machine", "name", "reason"),
    [
        (H200, "nccl 1x4", "4 ranks with a GPU each need 4 GPUs; there is 1"),
        (OLD_NCCL, "nccl with several ranks on a GPU 1x2", "NCCL 2.28.9 lets no two ranks share a GPU; 2.30 does"),
        (replace(H200, missing={"NCCL": "no libnccl"}), "nccl 1x1", "no libnccl"),
        (replace(H200, missing={"nccl4py": "not installed"}), "nccl by nccl4py 1x2", "not installed"),
        (replace(H200, missing={"MPI": "no MPI"}), "cuda_ipc 1x2", "no MPI"),
        (replace(H200, missing={"compute-sanitizer": "no toolkit"}), "sanitizer", "no toolkit"),
    ],
    ids=["one GPU", "an old NCCL", "no NCCL", "no nccl4py", "no MPI", "no sanitizer"],
)
def test_a_machine_that_lacks_something_runs_the_rest(machine, name, reason):
    refusals = {probe.name: probe.refusal(machine) for probe in PROBES}
    assert refusals[name] == reason
    assert refusals["timing pack"] == "", "which needs a GPU alone"
    assert len(refusals) == len(PROBES), "each has a name of its own"


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
    with pytest.raises(AssertionError, match=rf"it was killed after {0.5 * busy / os.cpu_count():g} s\njoining"):
        program("report.write_text('{\"cut'); print('joining', flush=True); time.sleep(600)", seconds=0.5).run()
    assert time.monotonic() - begun < 300


CLEAN, FOUND = "========= ERROR SUMMARY: 0 errors", "========= ERROR SUMMARY: 3 errors"


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Give a function that has the sanitizer say one thing of the kernels and another one of the planted error."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def say(of_kernels, of_planted):
        program = tmp_path / "compute-sanitizer"
        text = f'case "$*" in *planted*) echo "{of_planted}"; exit 1;; *) echo "{of_kernels}";; esac'
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        return sanitizer.main()

    return say


def test_errors_are_counted_for_each_tool(says):
    tools = ("memcheck_errors", "initcheck_errors", "racecheck_errors")
    assert says(CLEAN, FOUND) == {**dict.fromkeys(tools, 0), "planted_errors": 3}
    assert says(FOUND, FOUND)["memcheck_errors"] == 3
    assert sanitizer.errors_in("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)") == 2
    assert sanitizer.errors_in("========= ERROR SUMMARY: 1 error") == 1


def test_a_sanitizer_that_overlooks_the_planted_error_proves_nothing(says):
    with pytest.raises(AssertionError, match="overlooks a write beyond the end"):
        says(CLEAN, CLEAN)
    with pytest.raises(AssertionError, match="says nothing of errors"):
        says("Device not supported", FOUND)


MOVES = ["move_segments<float, bfloat16>", "move_segments<bfloat16, float>", "move_segments<float, float>"]
FOLDS = ["fold_peers<float, Sum>"]
SMALL = Sizes(nbytes=1 << 13, shapes=((3, 5), (7,), ()), sets=2, runs=1, fillers=2, rounds=2)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels.build(tmp_path_factory.mktemp("kernels"), [*MOVES, *FOLDS])


@pytest.mark.parametrize("name", TIMINGS)
def test_a_timing_gives_the_figures_that_have_goals(kernels, name):
    device = StandInDevice()
    device.kernels = kernels
    figures = TIMINGS[name](timings._Bench(device, SMALL))
    [probe] = [probe for probe in PROBES if probe.command[:2] == ("tests.gpu.timings", name)]
    assert probe.least
    assert probe.least.keys() <= figures.keys()
    assert all(np.isfinite(value) for value in figures.values())
    device.close()
