"""The probes of a GPU: what is run on a machine that has one, what each needs, and what it should reach."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from mpistrat.launch.mpiexec import command
from tests.gpu.machine import Machine
from tests.processes import TIMED_OUT, patient, run_bounded

Need = Callable[[Machine], str]
"""Returns why a machine cannot run a probe, or an empty text."""

SHOWN_LINES = 12
SHAPES = {"1x2": 2, "1x4": 4, "2x2": 4}
MULTI_RANK_NCCL = (2, 30)

_ON_GPU = {"MPISTRAT_DEVICE": "gpu", "MPISTRAT_ALLOW_SHARED_GPU": "1"}
_ON_CPU = {"MPISTRAT_DEVICE": "cpu"}
_NCCL = {
    "NCCL_NVLS_ENABLE": "0",  # what several ranks on one GPU cannot have
    "NCCL_MAX_CTAS": "4",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}
_IN_CHUNKS = {"MPISTRAT_ALGORITHM": "hierarchical", "MPISTRAT_CHUNK_BYTES": "1MiB"}
_SHARED_BY_RANKS = {**_NCCL, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@dataclass(frozen=True)
class Goal:
    """The least, or the most, that a figure should reach."""

    figure: str
    bound: float
    is_upper: bool = False

    def is_reached(self, figures: Mapping[str, float]) -> bool:
        """Return whether the figures reach it."""
        found = figures[self.figure]
        return found <= self.bound if self.is_upper else found >= self.bound

    def __str__(self) -> str:
        return f"{self.figure} {'<=' if self.is_upper else '>='} {self.bound:g}"


@dataclass(frozen=True)
class Probe:
    """One program, run in a session of its own; ``--report FILE`` is added to its command, where it writes its figures."""

    name: str
    shows: str  # what is known once it has run
    command: tuple[str, ...]  # a module and its arguments
    needs: tuple[Need, ...]  # what must be there
    num_ranks: int = 0  # how many ranks run it; 0: it is a process of its own
    environ: Mapping[str, str] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    seconds: float = 60.0  # after which it is killed, later on a busy machine

    def refusal(self, machine: Machine) -> str:
        """Return why a machine cannot run it, or an empty text."""
        return next(filter(None, (need(machine) for need in self.needs)), "")

    def run(self) -> dict[str, float]:
        """Return its figures; raise an AssertionError with its last words if it fails, or takes too long."""
        limit = patient(self.seconds)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            argv = [sys.executable, "-m", *self.command, "--report", str(report)]
            argv, extra = command(self.num_ranks, argv) if self.num_ranks else (argv, {})
            done = run_bounded(argv, limit, {**os.environ, **extra, **self.environ}, Path(__file__).parents[2])
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-SHOWN_LINES:])
            assert done.returncode != TIMED_OUT, f"it was killed after {limit:g} s\n{last}"
            text = report.read_text() if report.exists() and not done.returncode else "{}"  # else it may be cut off
        figures: dict[str, float] = json.loads(text)
        assert figures, f"it ended with {done.returncode}\n{last}"
        return figures

    def missed(self, figures: Mapping[str, float]) -> list[str]:
        """Return the goals that were not reached."""
        return [str(goal) for goal in self.goals if not goal.is_reached(figures)]


def _mpi(machine: Machine) -> str:
    return machine.missing.get("MPI", "")


def _gpu(machine: Machine) -> str:
    return machine.missing.get("GPU", "")


def _nccl(machine: Machine) -> str:
    return machine.missing.get("NCCL", "")


def _sanitizer(machine: Machine) -> str:
    return machine.missing.get("compute-sanitizer", "")


def _images(machine: Machine) -> str:
    return machine.missing.get("scikit-learn", "")


def _several_ranks_per_gpu(machine: Machine) -> str:
    if machine.nccl >= MULTI_RANK_NCCL:
        return ""
    return f"NCCL {machine.versions.get('NCCL')} lets no two ranks share a GPU; 2.30 does"


def _gpus(number: int) -> Need:
    def need(machine: Machine) -> str:
        found = len(machine.gpus)
        return "" if found >= number else f"{number} ranks with a GPU each need {number} GPUs; there is {found}"

    return need


def _timing(name: str, shows: str, goal: Goal) -> Probe:
    command = ("tests.gpu.timings", name)
    return Probe(f"timing {name}", shows, command, (_gpu,), environ=_ON_GPU, goals=(goal,))


def _conformance(
    transport: str, shapes: Mapping[str, int], needs: Sequence[Need], environ: Mapping[str, str], way: str = "", *more: str
) -> list[Probe]:
    shows = f"the conformance kit of transports on {transport}{f', {way}' if way else ''}"
    return [
        Probe(
            f"{transport}{f' {way}' if way else ''} {shape}",
            shows,
            ("tests.gpu.conformance", transport, "--shape", shape, *more),
            (_mpi, *needs),
            num_ranks,
            environ,
            seconds=_seconds(transport, num_ranks),
        )
        for shape, num_ranks in shapes.items()
    ]


def _seconds(transport: str, num_ranks: int) -> float:
    return 120.0 if transport == "nccl" and num_ranks > 2 else 60.0


def _strategy(shape: str, transport: str = "auto", needs: Sequence[Need] = (), **environ_between: str) -> Probe:
    by = "" if transport == "auto" else f", by {transport} inside nodes{' and between them' if environ_between else ''}"
    environ = {**_ON_GPU, "MPISTRAT_VIRTUAL_NODES": shape, "MPISTRAT_INTRA_TRANSPORT": transport, **environ_between}
    return Probe(
        f"strategy {shape}{by}",
        "every verb of a strategy on device arrays, through all layers, against NumPy",
        ("tests.gpu.verbs_rank",),
        (_mpi, _gpu, *needs),
        SHAPES[shape],
        {**environ, **(_SHARED_BY_RANKS if transport == "nccl" else {})},
        seconds=_seconds(transport, SHAPES[shape]),
    )


def _program(
    name: str,
    shows: str,
    command: tuple[str, ...],
    shape: str,
    transport: str,
    goals: tuple[Goal, ...] = (),
    seconds: float = 60.0,
    **environ: str,
) -> Probe:
    """Return a program of several ranks that share a GPU, by a transport inside their nodes."""
    by_nccl = transport == "nccl"
    return Probe(
        f"{name} {shape}, by {transport}",
        shows,
        command,
        (_mpi, _gpu, *((_nccl, _several_ranks_per_gpu) if by_nccl else ())),
        SHAPES[shape],
        {
            **_ON_GPU,
            **(_SHARED_BY_RANKS if by_nccl else {}),
            "MPISTRAT_VIRTUAL_NODES": shape,
            "MPISTRAT_INTRA_TRANSPORT": transport,
            **environ,
        },
        goals,
        seconds,
    )


def _soak(transport: str, seconds: float) -> Probe:
    return _program(
        "soak",
        "2000 steps of started and plain collectives of changing sizes, each compared with NumPy, and the memory they leave",
        ("tests.gpu.soak",),
        "2x2",
        transport,
        (Goal("device_mib_growth", 0, is_upper=True),),
        seconds,
        MPISTRAT_CHUNK_BYTES="1MiB",
    )


def _streams(shape: str, transport: str, seconds: float = 60.0, **environ: str) -> Probe:
    return _program(
        "streams",
        "arrays that a side stream writes late, in plain and started calls; wrong only where a wait is taken away",
        ("tests.gpu.streams",),
        shape,
        transport,
        seconds=seconds,
        **environ,
    )


def _open_close(transport: str, rounds: int, seconds: float) -> Probe:
    return _program(
        "open and close",
        "strategies, some two at a time, with buffers that grow: memory, files and threads that they leave",
        ("tests.gpu.open_close", "--rounds", str(rounds)),
        "1x2",
        transport,
        tuple(Goal(f"{held}_growth", 0, is_upper=True) for held in ("device_mib", "allocations", "threads", "files")),
        seconds,
    )


def _first_fault(transport: str, needs: Sequence[Need] = ()) -> Probe:
    environ = {**_ON_GPU, "MPISTRAT_INTRA_TRANSPORT": transport, **(_SHARED_BY_RANKS if transport == "nccl" else {})}
    return Probe(
        f"first fault, by {transport}",
        "a rank that raises, or is killed, before the first collective: the job ends and names it, and the GPU is free",
        ("tests.gpu.first_fault",),
        (_mpi, _gpu, *needs),
        environ=environ,
        goals=(
            Goal("raise_seconds", 10, is_upper=True),
            Goal("kill_seconds", 10, is_upper=True),
            Goal("mib_left", 0, is_upper=True),
        ),
        seconds=150.0,
    )


PROBES: tuple[Probe, ...] = (
    _timing("pack", "float32 fused and cast to bfloat16, 512 MiB", Goal("fraction", 0.85)),
    _timing("unpack", "a bucket of bfloat16 taken apart into float32, and divided", Goal("fraction", 0.85)),
    _timing("gradients", "ResNet-50's 161 gradients packed in one launch", Goal("fraction", 0.75)),
    _timing("sum_of_peers", "the sum of four arenas in one pass, as cuda_ipc does it", Goal("fraction", 0.80)),
    _timing("staged", "the staged path against the slower direction of pinned copies", Goal("fraction", 0.85)),
    Probe(
        "timing call",
        "what Python takes for an all-reduce whose plan is known, of one array and of 161, on a rank alone",
        ("tests.gpu.call_time",),
        (_gpu, _mpi),
        environ=_ON_GPU,
        goals=(Goal("python_us", 30, is_upper=True),),
    ),
    Probe(
        "overhead",
        "a rank's all-reduce beside ncclAllReduce and a copy, until the GPU is through",
        ("tests.gpu.overhead",),
        (_mpi, _gpu, _nccl),
        environ={**_ON_GPU, **_NCCL},
        goals=tuple(
            Goal(f"{ratio}_{size}", 1.05, is_upper=True) for size in ("16MiB", "256MiB") for ratio in ("ratio", "ratio_out")
        ),
    ),
    *(
        Probe(
            f"sums of 2 ranks {where}",
            "small sums in one shot, in two, and by NCCL; and bfloat16 by NCCL, in float32 and in its own dtype",
            ("tests.gpu.sums",),
            (_mpi, _gpu, _nccl, need),
            2,
            {**_ON_GPU, **environ},
            seconds=120.0,
        )
        for where, need, environ in (
            ("on 2 GPUs", _gpus(2), {}),
            ("on a GPU that they share", _several_ranks_per_gpu, _SHARED_BY_RANKS),
        )
    ),
    *chain.from_iterable(
        _conformance(transport, {"1x2": 2}, (), _ON_CPU) for transport in ("shared_memory", "mpi", "mpi_ring")
    ),
    *chain.from_iterable(_conformance(transport, SHAPES, (_gpu,), _ON_GPU) for transport in ("staged", "cuda_ipc")),
    *(_strategy(shape) for shape in SHAPES),
    _strategy("2x2", "staged"),
    *_conformance("cuda_aware", SHAPES, (_gpu,), _ON_GPU),
    _streams("1x2", "cuda_ipc"),
    *(_streams("2x2", transport, **_IN_CHUNKS) for transport in ("cuda_ipc", "staged")),
    *(
        _program(
            f"interop {library}",
            f"arrays of {name} on a GPU, float32 and bfloat16, also on a stream of its own",
            ("tests.gpu.interop", library),
            "1x2",
            "cuda_ipc",
            seconds=120.0,
            XLA_PYTHON_CLIENT_PREALLOCATE="false",
        )
        for library, name in (("torch", "PyTorch"), ("jax", "JAX"))
    ),
    Probe(
        "sanitizer",
        "every kernel on arrays at odd offsets under NVIDIA's compute-sanitizer, which finds an error that is planted",
        ("tests.gpu.sanitizer",),
        (_gpu, _sanitizer),
        environ=_ON_GPU,
        goals=tuple(Goal(f"{tool}_errors", 0, is_upper=True) for tool in ("memcheck", "initcheck", "racecheck")),
        seconds=300.0,
    ),
    _first_fault("cuda_ipc"),
    _open_close("cuda_ipc", 100, 150.0),
    _soak("cuda_ipc", 200.0),
    Probe(
        "training",
        "the demo's training on GPUs and on CPUs, to the same losses",
        ("tests.gpu.training_pair", "--ranks", "4", "--nodes", "2x2"),
        (_mpi, _gpu, _images),
        environ=_ON_GPU,
        goals=(Goal("largest_difference", 1e-3, is_upper=True),),
        seconds=90.0,
    ),
    *chain.from_iterable(
        _conformance("nccl", {f"1x{number}": number}, (_gpu, _nccl, _gpus(number)), _ON_GPU) for number in (1, 2, 4)
    ),
    *_conformance(
        "nccl",
        SHAPES,
        (_gpu, _nccl, _several_ranks_per_gpu),
        {**_ON_GPU, **_SHARED_BY_RANKS},
        "with several ranks on a GPU",
    ),
    _strategy("2x2", "nccl", (_nccl, _several_ranks_per_gpu)),
    _strategy("2x2", "nccl", (_nccl, _several_ranks_per_gpu), MPISTRAT_INTER_TRANSPORT="nccl"),
    Probe(
        "nccl deadline",
        "a collective of NCCL that one rank alone enters is ended by its deadline, and the GPU is free again",
        ("tests.gpu.deadline",),
        (_mpi, _gpu, _nccl, _several_ranks_per_gpu),
        2,
        {**_ON_GPU, **_SHARED_BY_RANKS},
        (Goal("seconds_late", 5.0, is_upper=True),),
    ),
    _first_fault("nccl", (_nccl, _several_ranks_per_gpu)),
    _streams("2x2", "nccl", 120.0, **_IN_CHUNKS),
    _open_close("nccl", 24, 150.0),
    _soak("nccl", 250.0),
    *_conformance("nccl", SHAPES, (_gpu, _nccl), {**_ON_GPU, **_NCCL}, "with a host id for every rank", "--host-id-per-rank"),
)
"""In the order in which they run: what is short and measures first, what may hang last."""
