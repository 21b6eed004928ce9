"""Data parallelism for JAX: averages of pytrees over all ranks, between compiled functions."""

from __future__ import annotations

from typing import Any

from mpistrat.arrays import as_operand, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.of_job import job_communicator
from mpistrat.errors import MpistratError

__all__ = ["average"]


def average(tree: Any, communicator: BaseCommunicator | None = None) -> Any:
    """Return a pytree with the averages over all ranks of its leaves. A collective call.

    Call it between compiled functions: what ``jax.jit`` traces has no values to send.

    Parameters
    ----------
    tree : pytree of jax.Array
        Gradients, say: of the same structure, shapes and dtypes on all ranks. None is an empty pytree, as in JAX.
    communicator : Communicator, optional
        Whose ranks average; by default all ranks of the job.

    Raises
    ------
    AgreementError
        On every rank, if structures, shapes or dtypes differ.
    UnsupportedDtypeError
        If a leaf is not an array of numbers, or is being traced.
    """
    import jax

    communicator = job_communicator() if communicator is None else communicator
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    try:
        arrays = [as_operand(leaf, f"tree{jax.tree_util.keystr(path)}") for path, leaf in leaves]
    except MpistratError as error:
        communicator.refuse("average", error)
    communicator.note(f"average of {structure}")
    averages = communicator.all_reduce("mean", arrays) if arrays else []
    return jax.tree_util.tree_unflatten(
        structure, [like(found, leaf) for found, (_, leaf) in zip(averages, leaves, strict=True)]
    )
