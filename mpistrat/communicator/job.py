"""The communicator over all ranks of the job, the default of the modules for PyTorch and JAX, and averages of nests over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mpistrat.arrays import as_operand, like
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.errors import MpistratError
from mpistrat.launch import bootstrap


@cache
def job_communicator() -> Communicator:
    """Return the communicator over all ranks of the job; the first call makes it, and is a collective one."""
    return Communicator(bootstrap.start())


def average_leaves(
    leaves: Sequence[Any], names: Callable[[], Sequence[str]], structure: object, communicator: BaseCommunicator | None
) -> list[Any]:
    """Return the averages over all ranks of the leaves of a nest, whose `names` are for errors. A collective call."""
    communicator = communicator or job_communicator()
    with communicator.refusing("average"):
        try:
            arrays = [as_operand(leaf) for leaf in leaves]
        except MpistratError:  # naming all leaves takes several times as long as reading them
            for leaf, name in zip(leaves, names(), strict=True):
                as_operand(leaf, name)
            raise
    communicator.note(f"average of {structure}")
    averages = communicator.all_reduce("mean", arrays) if arrays else []
    return list(map(like, averages, leaves))
