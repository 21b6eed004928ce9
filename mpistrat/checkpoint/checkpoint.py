"""Checkpoint and CheckpointManager: save the state of a job, and go on from it, on any number of ranks."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from json import dumps
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array, flat, to_host
from mpistrat.checkpoint import files
from mpistrat.checkpoint.files import Manifest, Piece
from mpistrat.checkpoint.tree import Spec, Tree
from mpistrat.checkpoint.writer import Writer
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.context.stack import get_strategy
from mpistrat.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_SHOWN = 20  # reasons why a checkpoint does not fit


class Checkpoint:
    """Objects whose state is saved to files and restored from them. Making one is a collective call.

    The strategy in whose scope it is made, the default one outside all, says which ranks save together: each writes an equal
    share of the bytes, and any number of ranks restores them. Values are those that all ranks have in common: arrays, numbers
    and random generators must be equal on all ranks; of variables synchronized ON_READ the aggregated value is saved.

    Parameters
    ----------
    **objects : Variable, array, object with state_dict and load_state_dict, numpy.random.Generator, dict or list
        What is saved, by name: variables, also those on servers; writable arrays; modules, optimizers and schedulers of
        PyTorch; datasets, whose position in an epoch is saved; dicts and lists of these, of numbers and of texts. They are
        restored in place.

    Raises
    ------
    InvalidArgumentError
        If a value is a number, a text or a tuple, which cannot be restored in place.
    """

    def __init__(self, **objects: Any) -> None:
        self._communicator: BaseCommunicator = get_strategy().extended.communicator
        with self._communicator.refusing("Checkpoint"):
            self._tree = Tree(objects)
        self._communicator.agree(f"Checkpoint of {', '.join(objects)}")
        self._writer = Writer(self._communicator)
        self._staged: dict[Piece, Array] = {}

    def save(self, path: str | os.PathLike[str], wait: bool = False, step: int = 0) -> str:
        """Save to a new folder, and return its path. A collective call.

        It returns when the values have been copied to host memory; a thread writes them. Another save waits for that first.

        Parameters
        ----------
        path : path
            A folder that does not exist, the same on all ranks.
        wait : bool
            Whether to wait until the checkpoint is durable.
        step : int
            What `CheckpointManager.restore` returns.

        Raises
        ------
        CheckpointError
            On all ranks, if one cannot write to the folder; with ``wait=False`` raised by the next call, `close`, or at exit.
        AgreementError
            On all ranks, if they save different things.
        """
        return self._save(Path(path), step, wait, lambda: None)

    def restore(self, path: str | os.PathLike[str], strict: bool = True) -> int:
        """Restore all objects from a folder, and return the step that was saved there. A collective call.

        Nothing is changed before every rank has read its share and compared checksums.

        Parameters
        ----------
        path : path
            A folder that `save` has returned.
        strict : bool
            Whether all arrays must be there, and no others.

        Raises
        ------
        CheckpointError
            On all ranks, if the folder is no whole checkpoint, or its arrays do not fit: all reasons are told at once.
        """
        self._writer.finish()
        folder = Path(path)
        manifest: Manifest | None = None
        error = ""
        if self._communicator.rank == 0:
            try:
                manifest = files.read_manifest(folder)
            except CheckpointError as failed:
                error = str(failed)
        manifest, error = self._communicator.broadcast_object((manifest, error))
        if not error:
            problems = self._tree.problems(manifest.arrays, manifest.document, strict)
            if problems:
                rest = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
                error = "\n    ".join([f"{folder} does not fit these objects:", *problems[:_SHOWN], *rest])
        self._raise_together(error)
        self._tree.restore(manifest.document, self._read(folder, manifest))
        return int(manifest.step)

    def close(self) -> None:
        """Wait until the last save is durable, and free what is held. A collective call.

        Raises
        ------
        CheckpointError
            On all ranks, if the last save has failed.
        """
        self._staged.clear()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:  # closing is collective
            self.close()

    def _save(self, folder: Path, step: int, wait: bool, when_durable: Callable[[], None]) -> str:
        started = time.perf_counter()
        self._writer.finish()
        communicator = self._communicator
        with communicator.refusing("save of a Checkpoint"):
            step = operator.index(step)
            document, arrays = self._tree.capture()
        specs = {name: Spec(str(array.dtype), tuple(array.shape)) for name, array in arrays.items()}
        communicator.agree(f"save of a Checkpoint, step={step}, {_outline(document, specs)}")
        error = ""
        if communicator.rank == 0:
            try:
                if (folder / files.MANIFEST).exists():
                    raise CheckpointError(f"{folder} is a checkpoint already: save to another folder")
                files.prepare(folder)
            except CheckpointError as failed:
                error = str(failed)
        self._raise_together(error)
        pieces = files.parts_of(specs, communicator.size)[communicator.rank]
        staged = self._stage(pieces, arrays)
        waited = time.perf_counter() - started
        manifest = Manifest(step, communicator.size, _version(), document, specs, {})
        self._writer.start(folder, manifest, pieces, staged, when_durable, waited)
        if wait:
            self._writer.finish()
        return str(folder)

    def _stage(self, pieces: list[Piece], arrays: dict[str, Array]) -> list[Array]:
        """Return copies of pieces in host memory, which is used again by the next save."""
        self._staged = {piece: self._staged[piece] for piece in pieces if piece in self._staged}
        for piece in pieces:
            part = to_host(flat(arrays[piece.name])[piece.start : piece.stop])
            kept = self._staged.get(piece)
            if kept is None or kept.dtype != part.dtype:
                kept = self._staged[piece] = np.empty_like(part)
            kept[...] = part
        return [self._staged[piece] for piece in pieces]

    def _read(self, folder: Path, manifest: Manifest) -> dict[str, Array]:
        """Return the arrays: each rank reads its share of the pieces, and broadcasts them."""
        communicator = self._communicator
        every = [(name, piece) for name, pieces in manifest.pieces.items() for piece in pieces]
        shares = list(zip(every, _readers(every, manifest.arrays, communicator.size), strict=True))
        mine: dict[Piece, Array] = {}
        error = ""
        try:
            for name in manifest.pieces:
                wanted = [piece for (file, piece), rank in shares if (file, rank) == (name, communicator.rank)]
                if wanted:
                    mine.update(files.read_pieces(folder / name, wanted, manifest.arrays))
        except CheckpointError as failed:
            error = str(failed)
        self._raise_together(error)
        found = {name: np.empty(prod(spec.shape), np.dtype(spec.dtype)) for name, spec in manifest.arrays.items()}
        for (_, piece), root in shares:
            target = found[piece.name][piece.start : piece.stop].view(np.uint8)
            source = mine[piece].view(np.uint8) if root == communicator.rank else target
            communicator.broadcast(source, root, out=target)
        return {name: array.reshape(manifest.arrays[name].shape) for name, array in found.items()}

    def _raise_together(self, error: str) -> None:
        """Raise a CheckpointError on all ranks, if one of them has an error. A collective call."""
        texts = self._communicator.all_gather(np.frombuffer(f"{error}\0".encode(), np.uint8)).tobytes().decode().split("\0")
        told = list(dict.fromkeys(filter(None, texts)))
        if told:
            raise CheckpointError("; ".join(told))


class CheckpointManager:
    """The checkpoints of a job in a directory, of which the newest ones are kept. Making one is a collective call.

    Parameters
    ----------
    checkpoint : Checkpoint
        What is saved.
    directory : path
        A directory on a file system that all ranks share. It is made by the first save.
    max_to_keep : int, optional
        How many checkpoints are kept; None keeps all.
    keep_every : int, optional
        Checkpoints whose step is a multiple of it are kept for ever, besides.

    Raises
    ------
    InvalidArgumentError
        If `checkpoint` is no Checkpoint, or a number is not positive.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_every: int | None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidArgumentError(f"checkpoint must be a mpistrat.Checkpoint; got {type(checkpoint).__name__}")
        for name, value in (("max_to_keep", max_to_keep), ("keep_every", keep_every)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidArgumentError(f"{name} must be a positive number or None; got {value!r}")
        self._checkpoint, self._directory = checkpoint, Path(directory)
        self._max_to_keep, self._keep_every = max_to_keep, keep_every
        error, found = "", list[Path]()
        if checkpoint._communicator.rank == 0:
            try:
                found = files.find_checkpoints(self._directory)
            except CheckpointError as failed:
                error = str(failed)
        self._found, error = checkpoint._communicator.broadcast_object((found, error))
        checkpoint._raise_together(error)

    @property
    def directory(self) -> str:
        """The directory."""
        return str(self._directory)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are kept, oldest first; all are durable."""
        return list(map(str, self._found))

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint; None if there is none."""
        return str(self._found[-1]) if self._found else None

    def save(self, step: int, wait: bool = False) -> str:
        """Save to a folder of the directory, and return its path. A collective call: see `Checkpoint.save`.

        The checkpoint is among `checkpoints` once it is durable; then those that are not kept are removed.
        """
        with self._checkpoint._communicator.refusing("save of a CheckpointManager"):
            if operator.index(step) < 0:
                raise InvalidArgumentError(f"step must not be negative; got {step}")
        self._checkpoint._writer.finish()
        folder = files.new_folder(self._directory, step, self._found)
        return self._checkpoint._save(folder, step, wait, lambda: self._add(folder))

    def restore(self, strict: bool = True) -> int | None:
        """Restore the newest checkpoint, and return its step; None if there is none. A collective call.

        See `Checkpoint.restore` for `strict` and the errors.
        """
        self._checkpoint._writer.finish()
        return self._checkpoint.restore(self._found[-1], strict) if self._found else None

    def close(self) -> None:
        """Close the checkpoint: see `Checkpoint.close`. A collective call."""
        self._checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:  # closing is collective
            self.close()

    def _is_kept(self, step: int) -> bool:
        return self._keep_every is not None and step % self._keep_every == 0

    def _add(self, folder: Path) -> None:
        """Add a durable checkpoint, and remove those that are not kept."""
        found = sorted([*self._found, folder], key=files.place_of)
        step = files.place_of(folder)[0]
        gone = [each for each in found if each != folder and files.place_of(each)[0] == step]  # it was saved again
        passing = [each for each in found if each not in gone and not self._is_kept(files.place_of(each)[0])]
        gone += [] if self._max_to_keep is None else passing[: -self._max_to_keep]
        self._found = [each for each in found if each not in gone]
        if self._checkpoint._communicator.rank == 0:
            for each in gone:
                files.remove(each)


def _outline(document: Any, specs: dict[str, Spec]) -> str:
    """Return a text that differs if ranks save different things: for each object its arrays, and a hash of what is plain."""
    texts = []
    for name, node in document[1]:
        of_arrays = [(key, spec) for key, spec in specs.items() if key == name or key.startswith(f"{name}/")]
        text = dumps([node, of_arrays])
        texts.append(f"{name}: {len(of_arrays)} arrays ({blake2b(text.encode(), digest_size=4).hexdigest()})")
    return ", ".join(texts)


def _readers(pieces: list[tuple[str, Piece]], specs: dict[str, Spec], size: int) -> list[int]:
    """Return which rank reads each piece: shares of about equal bytes."""
    sizes = [(piece.stop - piece.start) * np.dtype(specs[piece.name].dtype).itemsize for _, piece in pieces]
    total, before, readers = max(sum(sizes), 1), 0, []
    for nbytes in sizes:
        readers.append(min((before + nbytes // 2) * size // total, size - 1))
        before += nbytes
    return readers


def _version() -> str:
    from mpistrat import __version__

    return __version__
