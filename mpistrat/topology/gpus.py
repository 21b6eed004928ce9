"""GPUs of the ranks: checks that no two ranks share one, and finds the memory and network adapters near a GPU.

File law: neither MPI nor CUDA is started here. Callers pass what CUDA has returned; everything else is read from `/sys`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from mpistrat.errors import TopologyError

__all__ = ["Gpu", "GpuAffinity", "check_gpus", "gpu_affinity"]


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU, with identifiers that are valid in every process.

    Attributes
    ----------
    node : str
        The machine.
    uuid : str
        UUID of the GPU, or of the MIG instance, in hexadecimal.
    pci_bus_id : str
        Such as ``0000:17:00.0``.
    name : str
        Such as ``NVIDIA H200``.
    index : int
        CUDA's index in that process.
    """

    node: str
    uuid: str
    pci_bus_id: str
    name: str
    index: int

    @property
    def key(self) -> str:
        """A unique key: machine, PCI bus id, and UUID, which distinguishes MIG instances."""
        return f"{self.node} {self.pci_bus_id} {self.uuid}"

    def __str__(self) -> str:
        return f"{self.name} {self.pci_bus_id} on {self.node} (device {self.index}, UUID {self.uuid[:8]}…)"


@dataclass(frozen=True)
class GpuAffinity:
    """The memory, cores and network adapters near a GPU.

    Attributes
    ----------
    numa_node : int or None
        The nearest NUMA node; None if the machine has only one, or this is unknown.
    cpus : frozenset of int
        The cores of that node; empty if unknown.
    adapters : tuple of str
        Names of the InfiniBand or RoCE adapters that share the longest path in the PCI tree with it.
    """

    numa_node: int | None
    cpus: frozenset[int]
    adapters: tuple[str, ...]

    def __str__(self) -> str:
        memory = [] if self.numa_node is None else [f"memory of NUMA node {self.numa_node}"]
        near = [*memory, *self.adapters]
        return f"near {', '.join(near)}" if near else ""


def check_gpus(gpus: Sequence[Gpu | None], allow_shared: bool) -> None:
    """Check that either all ranks of a job drive a GPU or none does, and that no two drive the same one.

    Parameters
    ----------
    gpus : sequence of Gpu or None
        The GPU of each rank; None: it computes on its CPU.
    allow_shared : bool
        Whether several ranks may drive one GPU.

    Raises
    ------
    TopologyError
        If that does not hold; the message lists the ranks, and says what to do.
    """
    without = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    if without and len(without) < len(gpus):
        driving = [rank for rank, gpu in enumerate(gpus) if gpu is not None]
        raise TopologyError(
            f"ranks {_listed(driving)} drive a GPU, ranks {_listed(without)} see none: all ranks of a job must compute on "
            "GPUs, or all on CPUs. Ask the scheduler for GPUs on every node (SLURM: --gpus-per-node), install CuPy on all of "
            "them, or set MPISTRAT_DEVICE=cpu"
        )
    ranks_of: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None:
            ranks_of.setdefault(gpu.key, []).append(rank)
    shared = {key: ranks for key, ranks in ranks_of.items() if len(ranks) > 1}
    if shared and not allow_shared:
        ranks = next(iter(shared.values()))
        raise TopologyError(
            f"ranks {_listed(ranks)} drive the same GPU, {gpus[ranks[0]]}: each rank needs a GPU of its own. Start as many "
            "ranks per node as it has GPUs, let every rank see all GPUs of its node (SLURM: --gpus-per-node=N "
            "--gpu-bind=none), or set MPISTRAT_ALLOW_SHARED_GPU=1 for a test"
        )


def gpu_affinity(pci_bus_id: str, sys: Path = Path("/sys")) -> GpuAffinity:
    """Return the affinity of a GPU, as far as `/sys` shows it.

    Parameters
    ----------
    pci_bus_id : str
        PCI bus id of the GPU, in upper or lower case, such as ``0000:17:00.0``.
    sys : Path
        The kernel's sysfs folder.
    """
    device = sys / "bus/pci/devices" / pci_bus_id.lower()
    numa = _read(device / "numa_node")
    numa_node = int(numa) if numa.isdigit() else None  # -1: unknown
    return GpuAffinity(numa_node, _cores(_read(device / "local_cpulist")), _nearest_adapters(device, sys / "class/infiniband"))


def _nearest_adapters(device: Path, adapters: Path) -> tuple[str, ...]:
    """Return the adapters with the longest common path from the root of the PCI tree; none if they share no part of it."""
    place = device.resolve().parts
    shared: dict[str, int] = {}
    for adapter in sorted(adapters.iterdir()) if adapters.is_dir() else ():
        other = (adapter / "device").resolve().parts
        shared[adapter.name] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(place, other, strict=False)))
    most = max(shared.values(), default=0)
    return tuple(name for name, length in shared.items() if length == most)


def _cores(text: str) -> frozenset[int]:
    """Return the numbers in a list such as ``0-3,8``."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, … ({len(ranks)} in all)"
