"""The probes of a GPU: what is run on a machine that has one, what each needs, and what it should reach.

One by hand, with the words and variables below: ``mpistrat run -n 2 -m tests.gpu.streams blocks --report FILE``.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpistrat.launch.mpiexec import command
from tests.gpu.fault import FAULTS
from tests.gpu.program import Machine
from tests.gpu.sanitizer import TOOLS
from tests.processes import TIMED_OUT, patient, run_bounded

SHOWN_LINES = 12
SHAPES = {"1x2": 2, "1x4": 4, "2x2": 4}
MULTI_RANK_NCCL = (2, 30)

_NCCL = {
    "NCCL_NVLS_ENABLE": "0",  # what several ranks on one GPU cannot have
    "NCCL_MAX_CTAS": "4",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}
_IN_CHUNKS = {"MPISTRAT_ALGORITHM": "hierarchical", "MPISTRAT_CHUNK_BYTES": "1MiB"}
_TRAINED = {"largest_difference": 1e-3, "weights_differ_by": 1e-3}
_OUT = ("", "_out")  # a new result, and one where it is told
_BY_NCCL = ("NCCL", "shared GPU")  # what ranks that share a GPU need to be joined by NCCL


@dataclass(frozen=True)
class Probe:
    """One program, run in a session of its own; ``--report FILE`` is added to its command, where it writes its figures."""

    name: str
    command: tuple[str, ...]  # a module and its arguments
    needs: tuple[str, ...]  # what must be there, as `refusal_of` names it
    num_ranks: int = 0  # how many ranks run it; 0: it is a process of its own
    environ: Mapping[str, str] = field(default_factory=dict)
    # the least, and the most, that figures should reach
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 60.0  # after which it is killed, later on a busy machine

    def refusal(self, machine: Machine) -> str:
        """Return why a machine cannot run it, or an empty text."""
        return next(filter(None, (refusal_of(machine, need) for need in self.needs)), "")

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
        low = [f"{name} >= {bound:g}" for name, bound in self.least.items() if figures[name] < bound]
        return low + [f"{name} <= {bound:g}" for name, bound in self.most.items() if figures[name] > bound]


def refusal_of(machine: Machine, need: str) -> str:
    """Return why a machine lacks what is needed: ``GPU``, ``NCCL``, ``MPI``, …, ``2 GPUs``, or a ``shared GPU``; or nothing."""
    if need == "shared GPU":
        version = machine.versions.get("NCCL")
        return "" if machine.nccl >= MULTI_RANK_NCCL else f"NCCL {version} lets no two ranks share a GPU; 2.30 does"
    if need.endswith(" GPUs"):
        number, found = int(need.split()[0]), len(machine.gpus)
        return "" if found >= number else f"{number} ranks with a GPU each need {number} GPUs; there is {found}"
    return machine.missing.get(need, "")


def _probe(
    name: str,
    words: str,
    *needs: str,
    ranks: int = 0,
    least: Mapping[str, float] | None = None,
    most: Mapping[str, float] | None = None,
    seconds: float = 60.0,
    **environ: str,
) -> Probe:
    """Return a probe of a program of this folder; it is told to compute on GPUs where it needs one."""
    told = {"MPISTRAT_DEVICE": "gpu", "MPISTRAT_ALLOW_SHARED_GPU": "1"} if "GPU" in needs else {"MPISTRAT_DEVICE": "cpu"}
    if "shared GPU" in needs:
        told |= {**_NCCL, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    needs = ("MPI", *needs) if ranks else needs
    argv = tuple(f"tests.gpu.{words}".split())
    return Probe(name, argv, needs, ranks, {**told, **environ}, least or {}, most or {}, seconds)


def _conformance(transport: str, shape: str, *needs: str, way: str = "", more: str = "", **environ: str) -> Probe:
    name, ranks = f"{transport}{f' {way}' if way else ''} {shape}", int(shape[0]) * int(shape[2])
    words, seconds = f"conformance {transport} {shape} {more}", _seconds(transport, ranks)
    return _probe(name, words, *needs, ranks=ranks, seconds=seconds, **environ)


def _seconds(transport: str, num_ranks: int) -> float:
    return 120.0 if transport == "nccl" and num_ranks > 2 else 60.0


def _strategy(shape: str, transport: str = "auto", **between: str) -> Probe:
    by = "" if transport == "auto" else f", by {transport} inside nodes{' and between them' if between else ''}"
    seconds = _seconds(transport, SHAPES[shape])
    return _on_nodes(f"strategy {shape}{by}", "verbs_rank", shape, transport, seconds=seconds, **between)


def _on_nodes(name: str, words: str, shape: str, transport: str, **how: object) -> Probe:
    """Return a program of several ranks that share a GPU, by a transport inside their nodes."""
    needs = ("GPU", *(_BY_NCCL if transport == "nccl" else ()))
    name = name if name.startswith("strategy") else f"{name} {shape}, by {transport}"
    nodes = {"MPISTRAT_VIRTUAL_NODES": shape, "MPISTRAT_INTRA_TRANSPORT": transport}
    return _probe(name, words, *needs, ranks=SHAPES[shape], **{**nodes, **how})  # type: ignore[arg-type]


def _soak(transport: str, seconds: float) -> Probe:
    how = {"most": {"device_mib_growth": 0}, "seconds": seconds, "MPISTRAT_CHUNK_BYTES": "1MiB"}
    return _on_nodes("soak", "soak verbs", "2x2", transport, **how)


def _open_close(transport: str, rounds: int) -> Probe:
    most = {f"{held}_growth": 0 for held in ("device_mib", "allocations", "threads", "files")}
    return _on_nodes("open and close", f"soak strategies {rounds}", "1x2", transport, most=most, seconds=150.0)


def _fault(when: str, transport: str, *needs: str) -> Probe:
    most = {**{f"{fault}_seconds": 10 for fault in FAULTS[when]}, "mib_left": 0}
    chosen = {"MPISTRAT_INTRA_TRANSPORT": transport}
    return _probe(f"{when} fault, by {transport}", f"fault {when}", "MPI", "GPU", *needs, most=most, seconds=150.0, **chosen)


def _streams(transport: str) -> Iterator[Probe]:
    least = {"reused": 1, "wrong_without_wait" if transport == "nccl" else "wrong_without_event": 1}
    yield _on_nodes("streams", "streams blocks", "1x2", transport, least=least)
    yield _on_nodes("streams, MemoryAsyncPool,", "streams async", "1x2", transport, least=least)
    per_thread = {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}
    yield _on_nodes("streams, a stream per thread,", "streams blocks", "1x2", transport, least=least, **per_thread)
    yield _on_nodes("streams", "streams blocks", "2x2", transport, least={"reused": 1}, seconds=120.0, **_IN_CHUNKS)


def _torch_backward(transport: str) -> Iterator[Probe]:
    least = {"hooks_elsewhere": 1, "reused": 1}
    yield _on_nodes("torch backward", "torch_backward", "1x2", transport, least=least, seconds=120.0)
    least = {"wrong_without_wait": 1}
    yield _on_nodes("torch backward without waits", "torch_backward wait", "1x2", transport, least=least, seconds=120.0)


PROBES: tuple[Probe, ...] = (
    *(
        _probe(f"timing {name}", f"timings {name}", "GPU", least={"fraction": fraction})
        for name, fraction in {"pack": 0.85, "unpack": 0.85, "gradients": 0.75, "sum_of_peers": 0.80, "staged": 0.85}.items()
    ),
    *(
        _probe(f"{name} of 2 ranks on {where}", *(words, "GPU", *needs), ranks=2, most=most, seconds=120.0)
        for where, needs in (("2 GPUs", ("NCCL", "2 GPUs")), ("a GPU that they share", _BY_NCCL))
        for name, words, most in (
            ("host time", "host_time real", {"all_reduce, one array": 30}),
            ("overhead", "host_time overhead", {f"ratio{out}_{size}": 1.05 for size in ("16MiB", "256MiB") for out in _OUT}),
        )
    ),
    *(_conformance(transport, shape, "GPU") for transport in ("staged", "cuda_ipc") for shape in SHAPES),
    *(_strategy(shape) for shape in SHAPES),
    _strategy("2x2", "staged"),
    *(_conformance("cuda_aware", shape, "GPU") for shape in SHAPES),
    *_streams("cuda_ipc"),
    _on_nodes("streams", "streams blocks", "2x2", "staged", least={"reused": 1}, seconds=120.0, **_IN_CHUNKS),
    _on_nodes("graphs", "graphs", "1x2", "cuda_ipc", least={"disturbed_by_query": 1}, seconds=90.0),
    *(
        _on_nodes(words, words, "1x2", "cuda_ipc", seconds=120.0, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        for words in ("interop torch", "interop jax")
    ),
    *_torch_backward("cuda_ipc"),
    _probe("sanitizer", "sanitizer", "GPU", "compute-sanitizer", most={f"{tool}_errors": 0 for tool in TOOLS}, seconds=300.0),
    *(_fault(when, "cuda_ipc") for when in ("first", "late")),
    _open_close("cuda_ipc", 100),
    _soak("cuda_ipc", 200.0),
    _probe(
        "training", "training_pair", "GPU", "scikit-learn", ranks=4, most=_TRAINED, seconds=90.0, MPISTRAT_VIRTUAL_NODES="2x2"
    ),
    *(_conformance("nccl", f"1x{number}", "GPU", "NCCL", f"{number} GPUs") for number in (1, 2, 4)),
    *(_conformance("nccl", shape, "GPU", *_BY_NCCL, way="with several ranks on a GPU", more="CuPy") for shape in SHAPES),
    _conformance("nccl", "1x1", "GPU", "NCCL", "nccl4py", way="by nccl4py", more="nccl4py"),
    *(_conformance("nccl", shape, "GPU", *_BY_NCCL, "nccl4py", way="by nccl4py", more="nccl4py") for shape in ("1x2", "2x2")),
    _strategy("2x2", "nccl"),
    _strategy("2x2", "nccl", MPISTRAT_INTER_TRANSPORT="nccl"),
    *(_fault(when, "nccl", *_BY_NCCL) for when in ("first", "late")),
    *_streams("nccl"),
    *_torch_backward("nccl"),
    _on_nodes("graphs", "graphs", "1x2", "nccl", least={"disturbed_by_query": 1}, seconds=90.0),
    _open_close("nccl", 24),
    _soak("nccl", 250.0),
    *(
        _conformance("nccl", shape, "GPU", "NCCL", way="with a host id for every rank", more="host-id-per-rank", **_NCCL)
        for shape in SHAPES
    ),
)
"""In the order in which they run: what is short and measures first, what may hang last. Each program says what it shows."""
