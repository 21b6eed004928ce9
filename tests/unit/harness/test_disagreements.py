"""What tests are made with judges rightly: the harness of disagreements, and what gathers evidence where there is no GPU."""

import os
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.disagreements.calls import Call
from tests.disagreements.deviations import MAY_BE_RIGHT, ORDERS, RIGHT, TOLD, TOLD_OR_REPORTED, outcomes
from tests.disagreements.kinds import KINDS, LARGE, all_plans, drawn_plans, quick_plans, table
from tests.disagreements.memory import Memory, Neighbours, changed
from tests.disagreements.verdicts import Evidence, judge, missing_in_report, ranks_named
from tests.gpu import sanitizer, timings
from tests.gpu.on_host import HostKernels
from tests.gpu.probes import PROBES, Probe
from tests.gpu.program import Machine
from tests.gpu.stand_in import StandInDevice

ERROR = {
    "type": "AgreementError",
    "bases": ["AgreementError"],
    "text": "ranks made different calls\n  rank 2: barrier",
    "raised_by_us": True,
}
RAW = {"type": "Exception", "bases": ["Exception"], "text": "MPI_ERR_TRUNCATE: message truncated", "raised_by_us": False}
NUMPY = {"type": "ValueError", "bases": ["ValueError"], "text": "operands could not be broadcast", "raised_by_us": False}
ERRNO = {"type": "UnavailableError", "bases": ["UnavailableError"], "text": "(Bad address)", "raised_by_us": True}
REPORT = "rank 0: waiting 3 s in all_reduce\n  missing: rank 2 (node1), at train.py:17, alive\n"


def ended(*errors):
    return {rank: {"error": error} for rank, error in enumerate(errors)}


@pytest.mark.parametrize(
    ("name", "evidence"),
    [
        ("right", Evidence(2, ended(None, None), {0: ["all_reduce right"], 1: ["all_reduce right"]})),
        ("silent", Evidence(2, ended(None, None), {0: ["all_reduce right"], 1: ["all_reduce wrong"]})),
        ("told", Evidence(2, ended(ERROR, ERROR))),
        ("told", Evidence(2, ended(ERROR, ERROR), {0: ["all_reduce wrong"]})),
        ("partial", Evidence(2, ended(ERROR, None))),
        ("partial", Evidence(2, {0: ended(ERROR)[0]}, still=True)),
        ("raw", Evidence(2, ended(ERROR, {**ERROR, "text": "ranks made different calls"}))),
        ("raw", Evidence(2, ended(ERROR, RAW))),
        ("raw", Evidence(2, ended(NUMPY, NUMPY))),
        ("raw", Evidence(2, ended(ERRNO, ERRNO))),
        ("raw", Evidence(2, exit_code=1, output="MPI_ERR_TRUNCATE")),
        ("told", Evidence(2, exit_code=1, output="[rank 0 on a] mpistrat.errors.AgreementError: ranks")),
        ("crash", Evidence(2, exit_code=134, output="free(): invalid next size (normal)")),
        ("crash", Evidence(2, exit_code=139, output="process rank 0 exited on signal 11")),
        ("hang", Evidence(2, still=True)),
        ("hang", Evidence(3, still=True, output=REPORT.replace("rank 2", "rank 1"))),
        ("reported", Evidence(3, still=True, output=REPORT)),
        ("foreign", Evidence(2, ended(ERROR, ERROR), foreign=["rank 0: 8 bytes of a canary"])),
    ],
)
def test_a_case_is_put_in_its_class(name, evidence):
    assert judge(evidence, "AgreementError", odd=2, alone=False, is_right=True).name == name


def test_a_value_in_the_place_of_an_error_is_silent_and_a_report_names_rank_and_line():
    assert judge(Evidence(2, ended(None, None)), "", odd=0, alone=False, is_right=False).name == "silent"
    assert judge(Evidence(2, exit_code=0), "AgreementError", odd=0, alone=True, is_right=False).name == "silent"
    evidence = Evidence(3, still=True, output="rank 0 has waited 3 s\n  missing: rank 2 (a): gone")
    assert judge(evidence, "", odd=2, alone=True, is_right=False).name == "reported"
    assert judge(evidence, "", odd=1, alone=True, is_right=False).name == "hang"
    assert judge(evidence, "", odd=2, alone=False, is_right=False).name == "hang"
    assert missing_in_report(REPORT, 2) == ["train.py:17"]
    assert missing_in_report(REPORT, 1) == []
    assert missing_in_report(REPORT.replace("train.py:17, ", ""), 2) == []
    assert missing_in_report(REPORT.replace("waiting", "idle"), 2) == []
    assert missing_in_report('waiting; not come: rank 2:\n  File "a/train.py", line 17, in step', 2) == ["train.py:17"]
    assert ranks_named("ranks 0-2, 4: a\n  rank 7: b") == {0, 1, 2, 4, 7}
    places = "missing: rank 1 is at job.py:31\nmissing: rank 2 is at job.py:40\nin it: rank 3, job.py:7"
    found = [missing_in_report(f"rank 0 has waited\n{places}", rank) for rank in range(4)]
    assert found == [[], ["job.py:31"], ["job.py:40"], []]


def test_what_is_written_beside_an_array_is_found_from_outside(tmp_path):
    memory = Memory(tmp_path / "memory")
    operand, result = memory.array(1000, "float64"), memory.array((3, 5), "int8", misaligned=1)
    operand[...] = 1
    memory.seal(operand)
    result[...] = 7
    assert changed(tmp_path / "memory") == []
    assert result.__array_interface__["data"][0] % 2
    beyond = np.lib.stride_tricks.as_strided(operand, (1003,), (8,))
    beyond[1001] += 1.0
    assert changed(tmp_path / "memory") == ["1 bytes of a canary of 8000, the first at 11"]
    memory.reset()
    again = memory.array(1000, "float64")
    memory.seal(again)
    again[3] += 1
    assert changed(tmp_path / "memory") == ["an operand of 8000 bytes"]
    neighbours = Neighbours(80)
    assert neighbours.changed() == []
    neighbours._kept[2][5] = 0
    assert neighbours.changed() == ["1 bytes of an array that takes part in nothing"]


def reduce(count=5, **arguments):
    return Call("all_reduce", (count,), **arguments)


def gather(*shape, **arguments):
    return Call("all_gather", shape, place=0, **arguments)


@pytest.mark.parametrize(
    ("expected", "usual", "odd"),
    [
        (RIGHT, [reduce()], [reduce()]),
        (TOLD, [reduce()], [reduce(6)]),
        (TOLD, [reduce()], [reduce(op="max")]),
        (TOLD, [reduce()], [reduce(is_on_thread=True)]),
        (TOLD, [reduce()], [gather(5)]),
        (TOLD, [reduce(), reduce(6)], [reduce(6), reduce()]),
        (TOLD, [reduce(), reduce()], [reduce()]),
        (RIGHT, [reduce()], [Call("late"), reduce(layout="strided")]),
        (MAY_BE_RIGHT, [reduce()], [reduce(layout="big_endian")]),
        (MAY_BE_RIGHT, [reduce()], [reduce(options={"algorithm": "flat"})]),
        (MAY_BE_RIGHT, [reduce()], [Call("started", (5,))]),
        (RIGHT, [reduce()], [Call("into", (5,))]),
        (RIGHT, [gather(5, 2)], [gather(7, 2)]),
        (TOLD, [gather(5, 2)], [gather(5, 3)]),
        (TOLD, [gather(5, 2)], [gather(5, 2, dtype="int64")]),
        (RIGHT, [Call("broadcast", (5,), place=0)], [Call("broadcast", (7,), dtype="int8", place=0)]),
        (TOLD, [Call("broadcast", (5,), place=0)], [Call("broadcast", (5,), place=1)]),
        (TOLD_OR_REPORTED, [Call("strategy"), reduce()], [reduce()]),
        (TOLD_OR_REPORTED, [reduce(), reduce(strategy=1)], [reduce(strategy=1), reduce()]),
    ],
)
def test_how_a_case_may_end_follows_from_what_differs(expected, usual, odd):
    assert outcomes(usual, odd) == expected


def test_calls_are_left_out_made_twice_and_swapped():
    first, second, third = calls = [reduce(1), reduce(2), reduce(3)]
    found = {what: [way(index)(calls) for index in range(4)] for what, way in ORDERS.items()}
    assert found["without"] == [[second, third], [first, third], [first, second], calls]
    assert found["twice"][1:] == [[first, second, second, third], [*calls, third], calls]
    assert found["swapped"] == [[second, first, third], [first, third, second], calls, calls]


def test_there_are_kinds_and_cases_enough():
    assert len(KINDS) >= 400
    assert all(table(count).keys() == KINDS.keys() for count in LARGE)
    plans = list(all_plans(4))
    assert len(set(plans)) == len(plans)
    assert {len(plan.odd) for plan in plans} == {1, 2, 3}
    assert {rank for plan in plans for rank in plan.odd} == {0, 1, 2, 3}
    assert {plan.kind for plan in quick_plans(4)} == {plan.kind for plan in plans}
    assert list(drawn_plans("drawn_pair", 2, 5, 100)) == list(drawn_plans("drawn_pair", 2, 5, 100))


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
    assert refusals == ["no GPU"] * 63


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


def test_a_probe_is_judged_by_what_it_writes_and_a_failure_told_with_its_last_words(program):
    probe = program("report.write_text('{\"fraction\": 0.5}')", least={"fraction": 0.85})
    assert (probe.run(), probe.missed({"fraction": 0.5}), probe.missed({"fraction": 0.9})) == (
        {"fraction": 0.5},
        ["fraction >= 0.85"],
        [],
    )
    probe = program("", most={"us": 30})
    assert (probe.missed({"us": 20}), probe.missed({"us": 40})) == ([], ["us <= 30"])
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


def test_errors_are_counted_for_each_tool_and_an_overlooked_one_is_found(says):
    tools = ("memcheck_errors", "initcheck_errors", "racecheck_errors")
    assert says(CLEAN, FOUND) == {**dict.fromkeys(tools, 0), "planted_errors": 3}
    assert says(FOUND, FOUND)["memcheck_errors"] == 3
    assert sanitizer.errors_in("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)") == 2
    assert sanitizer.errors_in("========= ERROR SUMMARY: 1 error") == 1
    with pytest.raises(AssertionError, match="overlooks a write beyond the end"):
        says(CLEAN, CLEAN)
    with pytest.raises(AssertionError, match="says nothing of errors"):
        says("Device not supported", FOUND)


MOVES = ["move_segments<float, bfloat16>", "move_segments<bfloat16, float>", "move_segments<float, float>"]
SMALL = timings.Sizes(nbytes=1 << 13, shapes=((3, 5), (7,), ()), sets=2, runs=1, fillers=2, rounds=2)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels.build(tmp_path_factory.mktemp("kernels"), [*MOVES, "fold_peers<float, Sum>"])


@pytest.mark.parametrize("name", timings.TIMINGS)
def test_a_timing_gives_the_figures_that_have_goals(kernels, name):
    device = StandInDevice()
    device.kernels = kernels
    figures = timings.TIMINGS[name](timings._Bench(device, SMALL))
    [probe] = [probe for probe in PROBES if probe.command[:2] == ("tests.gpu.timings", name)]
    assert probe.least
    assert probe.least.keys() <= figures.keys()
    assert all(np.isfinite(value) for value in figures.values())
    device.close()
