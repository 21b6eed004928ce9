"""The probes of a GPU: what is run on a machine that has one, what each needs, and what it should reach. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tests.gpu.machine import Machine

__all__ = ["PROBES", "Goal", "Probe"]

Need = Callable[[Machine], str]
"""Returns why a machine cannot run a probe, or an empty text."""

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
_SHARED_BY_RANKS = {**_NCCL, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@dataclass(frozen=True)
class Goal:
    """What a figure should reach.

    Attributes
    ----------
    figure : str
        Its name.
    bound : float
        The least, or the most, that will do.
    is_upper : bool
        Whether `bound` is the most.
    """

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
    """One program, run in a session of its own.

    Attributes
    ----------
    name : str
        As the evidence calls it.
    shows : str
        What is known once it has run.
    command : tuple of str
        A module and its arguments; ``--report FILE`` is added, where it writes its figures.
    needs : tuple of callable
        What must be there.
    num_ranks : int
        How many ranks run it; 0: it is a process of its own.
    environ : mapping
        Variables it is given.
    goals : tuple of Goal
        What its figures should reach.
    seconds : float
        After which it is killed.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    needs: tuple[Need, ...]
    num_ranks: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    seconds: float = 60.0

    def refusal(self, machine: Machine) -> str:
        """Return why a machine cannot run it, or an empty text."""
        return next(filter(None, (need(machine) for need in self.needs)), "")


def _mpi(machine: Machine) -> str:
    return machine.missing.get("MPI", "")


def _gpu(machine: Machine) -> str:
    return machine.missing.get("GPU", "")


def _nccl(machine: Machine) -> str:
    return machine.missing.get("NCCL", "")


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
        )
        for shape, num_ranks in shapes.items()
    ]


def _strategy(shape: str, transport: str = "auto", needs: Sequence[Need] = ()) -> Probe:
    by = "" if transport == "auto" else f", by {transport} inside nodes"
    environ = {**_ON_GPU, "MPISTRAT_VIRTUAL_NODES": shape, "MPISTRAT_INTRA_TRANSPORT": transport}
    return Probe(
        f"strategy {shape}{by}",
        "every verb of a strategy on device arrays, through all layers, against NumPy",
        ("tests.gpu.verbs_rank",),
        (_mpi, _gpu, *needs),
        SHAPES[shape],
        {**environ, **(_SHARED_BY_RANKS if transport == "nccl" else {})},
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
    *chain.from_iterable(
        _conformance(transport, {"1x2": 2}, (), _ON_CPU) for transport in ("shared_memory", "mpi", "mpi_ring")
    ),
    *chain.from_iterable(_conformance(transport, SHAPES, (_gpu,), _ON_GPU) for transport in ("staged", "cuda_ipc")),
    *(_strategy(shape) for shape in SHAPES),
    _strategy("2x2", "staged"),
    *_conformance("cuda_aware", SHAPES, (_gpu,), _ON_GPU),
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
    Probe(
        "nccl deadline",
        "a collective of NCCL that one rank alone enters is ended by its deadline, and the GPU is free again",
        ("tests.gpu.deadline",),
        (_mpi, _gpu, _nccl, _several_ranks_per_gpu),
        2,
        {**_ON_GPU, **_SHARED_BY_RANKS},
        (Goal("seconds_late", 5.0, is_upper=True),),
    ),
    *_conformance("nccl", SHAPES, (_gpu, _nccl), {**_ON_GPU, **_NCCL}, "with a host id for every rank", "--host-id-per-rank"),
)
"""In the order in which they run: what is short and measures first, what may hang last."""
