"""FileDataset: global batches of the rows of many files, of which each rank can read its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.array_spec import spec_of
from mpistrat.inputs.checks import checked_int
from mpistrat.inputs.dataset import Dataset
from mpistrat.inputs.rebatch import batched, num_rows, readable, share
from mpistrat.structures import map_leaves

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FileDataset"]


class FileDataset(Dataset):
    """Cuts the rows of files, one file after another, into global batches. It can be iterated again and again.

    Distributed, each rank reads every num_replicas_in_sync-th file (``AutoShardPolicy.FILE``, which AUTO stands for here);
    with ``AutoShardPolicy.DATA`` each rank reads all files and keeps its share of every batch.

    Parameters
    ----------
    files : sequence of path
        In the same order on all ranks; folders may differ, as for node-local disks.
    read_fn : callable
        Called with the path of a file, returns its rows: a nest of arrays with equal extents along the first axis, or an
        iterator of such parts.
    batch_size : int
        Rows of a global batch: of all replicas together.
    shuffle : bool
        Whether each epoch has another order of files, and of the rows in each part. It does not depend on the number of
        replicas.
    seed : int
        Not negative; the same on all ranks.
    drop_remainder : bool
        Whether a last batch with fewer rows is left out.

    Raises
    ------
    TypeError
        If `files` is one path, `read_fn` cannot be called, or `batch_size` or `seed` is not an int.
    InvalidArgumentError
        If there are no files, `batch_size` is less than 1 or `seed` negative.
    """

    is_file_based = True

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        read_fn: Callable[[Any], Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        if isinstance(files, (str, bytes, os.PathLike)):
            raise TypeError(f"files must be a sequence of paths, sorted(glob.glob(pattern)) for example; got {files!r}")
        if not callable(read_fn):
            raise TypeError(f"read_fn must be a function of a path, numpy.load for example; got {read_fn!r}")
        self._files = list(files)
        if not self._files:
            raise InvalidArgumentError("a dataset needs at least one file; got none")
        self._read_fn = read_fn
        self._batch_size = checked_int(batch_size, "batch_size", 1)
        self._seed = checked_int(seed, "seed", 0)
        self._shuffle = shuffle
        self._drop_remainder = drop_remainder
        self._places = range(len(self._files))
        self._spec: Any = None

    @property
    def batch_size(self) -> int:
        """Rows of a global batch."""
        return self._batch_size

    @property
    def num_files(self) -> int:
        """How many files there are."""
        return len(self._places)

    @property
    def num_batches(self) -> None:
        """None: unknown before the files are read."""
        return None

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every batch; the first file is read for it."""
        if self._spec is None:
            next(self._parts(0), None)
        if self._spec is None:
            raise InvalidArgumentError(f"{self!r} has no rows, so that its element_spec is unknown")
        return self._spec

    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        """Yield a replica's share of each global batch of an epoch; all files are read for it."""
        for batch in batched(self._parts(epoch), [self._batch_size], self._drop_remainder):
            yield share(batch, replica, num_replicas)

    def describe(self) -> str:
        """Return a description that must be the same on all ranks: names and order of the files, and the batches."""
        names = [Path(file).name for file in self._files]
        order = f"shuffled with seed {self._seed}" if self._shuffle else "in order"
        rest = ", remainder dropped" if self._drop_remainder else ""
        files = f"{len(names)} files from {names[0]} to {names[-1]} (checksum {crc32(repr(names).encode()):08x})"
        return f"{files}, batches of {self._batch_size}, {order}{rest}"

    def _part(self, num_shards: int, index: int) -> Self:
        """Return every `num_shards`-th file of each epoch's order.

        Raises
        ------
        InvalidArgumentError
            If there are fewer files than parts.
        """
        if num_shards > self.num_files:
            raise InvalidArgumentError(
                f"{self.num_files} files cannot be shared by {num_shards} input pipelines: some would have none. Write more "
                "files, or let each pipeline read all of them: InputOptions(auto_shard_policy=AutoShardPolicy.DATA)"
            )
        part = self._copy()
        part._places = self._places[index::num_shards]
        return part

    def _parts(self, epoch: int) -> Iterator[Any]:
        """Yield the parts of this shard's files, in the order of an epoch."""
        order: Array = np.arange(len(self._files))
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(order)
        for number in (int(order[place]) for place in self._places):
            found = self._read_fn(self._files[number])
            rng = np.random.default_rng((self._seed, epoch, number))
            for part in found if isinstance(found, Iterator) else (found,):
                yield self._checked(map_leaves(readable, part), self._files[number], rng)

    def _checked(self, part: Any, file: Any, rng: np.random.Generator) -> Any:
        """Return a part, shuffled if asked for, after checking that its spec equals that of the parts before."""
        spec = spec_of(part)
        if self._spec is None:
            self._spec = spec
        elif spec != self._spec:
            raise InvalidArgumentError(
                f"all files of a dataset must have the same shapes and dtypes; {file} has {spec}, others have {self._spec}"
            )
        if not self._shuffle:
            return part
        order = rng.permutation(num_rows(part))
        return map_leaves(lambda leaf: leaf[order], part)

    def __repr__(self) -> str:
        return f"FileDataset({self.num_files} files, batches of {self._batch_size})"
