"""Steps of a training, checkpoints that are saved meanwhile, and parameter servers, beside PyTorch's and TensorFlow's."""

import importlib.metadata
import json
import math
import statistics
import sys
from typing import Any

from mpistrat.launch.mpiexec import command
from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contest import OURS, competing
from tests.benchmarks.messages import KIB, MIB
from tests.benchmarks.pages import Table, spread
from tests.benchmarks.session import PEERS, Session, answers, answers_of
from tests.gradients import resnet50
from tests.hosts.lab import Lab

COUNTS = (10_000, 100_000, 1_000_000, 5_000_000, 25_000_000)
_RANK = "data_parallel_ranks.py"


def data_parallel(session: Session) -> dict[str, Table]:
    """Data parallel: steps of a PyTorch module with `average_gradients`, beside DistributedDataParallel on gloo."""
    session.versions["PyTorch"] = importlib.metadata.version("torch")
    counts = [*map(str, COUNTS[:2] if session.quick else COUNTS)]
    lines = [["hosts × ranks", "parameters", "mpistrat", "DDP on gloo", "DDP / mpistrat"]]
    for shape in ("1x2",) if session.quick else ("1x2", "1x4", "2x2"):
        for row in _in_lab(counts) if shape == "2x2" else answers_of(int(shape[-1]), _RANK, *counts):
            parameters, times = f"{row['parameters']:_}".replace("_", " "), [row["ours"], row["ddp"]]
            ratio = f"{row['ddp'] / row['ours']:.2f}"
            session.add(lines, [shape.replace("x", "×"), parameters, *map(format_seconds, times), ratio])
    return {"": lines}


def _in_lab(counts: list[str]) -> list[Any]:
    with Lab(2, "1gbit") as lab:
        return answers_of(4, _RANK, *counts, lab=lab, GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1")


NUM_BYTES, ROUNDS = 256 << 20, 40
_NAMES = {"mpistrat": "mpistrat", "torch": "PyTorch `async_save`", "savez": "`np.savez`, chief"}


def checkpoint(session: Session) -> dict[str, Table]:
    """Checkpoints: what a step waits for, whole saves, restores, and steps meanwhile, beside PyTorch's and `numpy.savez`."""
    session.versions.update({name: importlib.metadata.version(name) for name in ("torch", "safetensors")})
    num_bytes, rounds = (16 << 20, 1) if session.quick else (NUM_BYTES, ROUNDS)
    heads = ["arrays", "what", "step waits", "of a copy", "whole save", "plain write / save", "restore", "steps meanwhile"]
    lines = [heads]
    shares = [[math.prod(shape) for shape in resnet50()], [1] * 8]
    program = ("checkpoint_ranks.py", json.dumps(shares), str(num_bytes), str(rounds))
    for answer in answers_of(2, *program, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
        arrays = f"{answer['arrays']} of {format_bytes(answer['bytes'])}"
        beside = answer["seconds"].pop("beside")
        copy, write = (statistics.median(beside[what]) for what in ("copy", "write"))
        alone = [spread(beside["copy"]), "1.00", spread(beside["write"]), "1.00", "", _slower(beside)]
        session.add(lines, [arrays, "a copy, and a plain write", *alone])
        for name, seconds in answer["seconds"].items():
            session.add(lines, [arrays, _NAMES[name], *_cells(seconds, copy, write, name == "savez")])
    return {"": lines}


def _cells(seconds: dict[str, list[float]], copy: float, write: float, stands_still: bool) -> list[str]:
    middle = {what: statistics.median(each) for what, each in seconds.items()}
    return [
        spread(seconds["wait"]),
        f"{middle['wait'] / copy:.2f}",
        spread(seconds["save"]),
        f"{write / middle['save']:.2f}",
        spread(seconds["restore"]),
        "stand still" if stands_still else _slower(seconds),
    ]


def _slower(seconds: dict[str, list[float]]) -> str:
    """Return by how much steps were slower meanwhile: the median, and the quarters beside it."""
    slower = [meanwhile / step - 1 for step, meanwhile in zip(seconds["step"], seconds["step meanwhile"], strict=True)]
    low, middle, high = statistics.quantiles(slower, n=4) if len(slower) > 1 else slower * 3
    return f"{middle:+.0%} ({low:+.0%} to {high:+.0%})"


# bytes of an array, and how often each worker sends or receives it
CASES = ((KIB, 3000), (64 * KIB, 1500), (MIB, 200), (4 * MIB, 60))
WORKERS = 2  # beside one chief and one ps
MOST_WORKERS = (1, 2, 4)


def parameter_server(session: Session) -> dict[str, Table]:
    """Measure ours and TensorFlow's in turn, with one ps: everything with two workers, only functions with more and fewer."""
    cases = ((KIB, 100), (64 * KIB, 50)) if session.quick else CASES
    found: dict[tuple[str, int], dict[str, float]] = {}
    functions = [["", "workers", "schedule to done of an empty function", "functions per second"]]
    for workers in (WORKERS,) if session.quick else MOST_WORKERS:
        arguments = [str(workers), json.dumps(cases if workers == WORKERS else [])]
        for name, (program, environ) in _programs(session, workers, arguments).items():
            [one] = answers(program, environ)
            found[name, workers] = one
            session.add(functions, [name, str(workers), format_seconds(one["seconds"]), f"{one['functions']:.0f}"])
    ours, theirs = found[OURS, WORKERS], found.get(("TensorFlow", WORKERS))
    lines = [_line(name, ours, theirs) for name in ours if name.partition(" ")[0] in ("pull", "push")]
    steps = []
    with Lab(1, "unlimited") as lab, competing(session, lab, WORKERS) as contest:
        for nbytes, times in cases:
            rates = contest.call(OURS, "steps_per_second", nbytes=nbytes, times=times)
            served, synchronous = ours[f"step {nbytes}"], sum(rates)
            steps.append([format_bytes(nbytes), f"{served:.0f}", f"{synchronous:.0f}", f"{synchronous / served:.1f}"])
    return {
        "": [["per second, two workers together", "mpistrat", "TensorFlow", "times as many"], *lines],
        "functions": functions,
        "steps": [["steps per second, model of", "parameter servers", "synchronous", "times as many"], *steps],
    }


def _programs(session: Session, workers: int, arguments: list[str]) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return what starts ours and TensorFlow's, where that is installed, each with further environment."""
    found = {OURS: command(workers + 2, [sys.executable, str(PEERS / "parameter_server_ranks.py"), *arguments])}
    if python := session.environments.python("tensorflow"):
        session.versions["TensorFlow"] = "2.21.0"
        # its processes find their GPUs, and say a lot, by themselves
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        found["TensorFlow"] = ([python, str(PEERS / "tf_parameter_server.py"), *arguments], quiet)
    return found


def _line(name: str, ours: dict[str, float], theirs: dict[str, float] | None) -> list[str]:
    if theirs is None:
        return [_said(name), f"{ours[name]:.0f}", "", ""]
    return [_said(name), f"{ours[name]:.0f}", f"{theirs[name]:.0f}", f"{ours[name] / theirs[name]:.1f}"]


def _said(name: str) -> str:
    verb, _, size = name.partition(" ")
    return f"{verb} of {format_bytes(int(size)) if size.isdigit() else '64 random rows of 1 000 000 × 32'}"
