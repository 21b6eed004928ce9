"""ArrayDataset: global batches of rows of arrays in memory or in files."""

from __future__ import annotations

from typing import Any

from mpistrat.arrays import Array, like
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.array_spec import spec_of
from mpistrat.inputs.rebatch import readable
from mpistrat.inputs.rows import RowDataset
from mpistrat.structures import flatten, leaf_names

__all__ = ["ArrayDataset"]


class ArrayDataset(RowDataset):
    """Cuts arrays into global batches along their first axis. It can be iterated again and again.

    Each iteration is an epoch. The order depends on `seed` and the epoch's number, never on the number of replicas, so any
    number of replicas sees the same global batches.

    Parameters
    ----------
    arrays : nest of array_like
        Equal extents along the first axis; batches are arrays of the same kinds. Of a memory map, a replica reads only its
        own rows.
    batch_size : int
        Rows of a global batch: of all replicas together.
    shuffle : bool
        Whether each epoch has another order.
    seed : int
        Not negative; the same on all ranks.
    drop_remainder : bool
        Whether a last batch with fewer rows is left out.

    Raises
    ------
    TypeError
        If `batch_size` or `seed` is not an int.
    InvalidArgumentError
        If there are no arrays, one has no axis, the first extents differ, `batch_size` is less than 1 or `seed` negative.
    """

    def __init__(
        self, arrays: Any, batch_size: int, shuffle: bool = False, seed: int = 0, drop_remainder: bool = False
    ) -> None:
        self._given, self._structure = flatten(arrays)
        self._arrays = [readable(leaf) for leaf in self._given]
        num_rows = _common_extent(self._arrays, leaf_names(arrays, "arrays"))
        super().__init__(num_rows, batch_size, shuffle, seed, drop_remainder)

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every batch."""
        return spec_of(self._structure.unflatten(list(self._arrays)))

    def _read(self, rows: Array) -> Any:
        # not array.take, which first copies the whole of an array that is not contiguous
        taken = [like(array[rows], given) for array, given in zip(self._arrays, self._given, strict=True)]
        return self._structure.unflatten(taken)

    def _describe_row(self) -> str:
        rows = ", ".join(f"{array.dtype} {array.shape[1:]}" for array in self._arrays)
        return f"[{rows}] in {self._structure}"


def _common_extent(arrays: list[Array], names: list[str]) -> int:
    if not arrays:
        raise InvalidArgumentError("a dataset needs at least one array; got an empty structure")
    for array, name in zip(arrays, names, strict=True):
        if array.ndim == 0:
            raise InvalidArgumentError(
                f"{name} is a scalar; a dataset cuts arrays along their first axis. A list counts as a structure: "
                "np.array(list) makes an array of it"
            )
    extents = [len(array) for array in arrays]
    if len(set(extents)) > 1:
        found = ", ".join(f"{name} has {extent}" for name, extent in zip(names, extents, strict=True))
        raise InvalidArgumentError(f"all arrays of a dataset need the same number of rows; {found}")
    return extents[0]
