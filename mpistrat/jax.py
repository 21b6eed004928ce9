"""Data parallelism for JAX: averages of pytrees over all ranks, between compiled functions."""

from __future__ import annotations

from typing import Any

from mpistrat.communicator.communicator import average_leaves
from mpistrat.communicator.interface import BaseCommunicator

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
        If a leaf is not an array of floats, or is being traced.
    TypeError
        If `communicator` is not a communicator.
    """
    import jax

    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in with_paths]

    def names() -> list[str]:
        return [f"tree{jax.tree_util.keystr(path)}" for path, _ in with_paths]

    return jax.tree_util.tree_unflatten(structure, average_leaves(leaves, names, structure, communicator))
