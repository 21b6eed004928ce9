"""Checkpoint and CheckpointManager: save the state of a job, and go on from it, on any number of ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_bytes, flat, is_on_device
from mpistrat.checkpoint import files
from mpistrat.checkpoint.files import Layout, Manifest, Piece, Save, Writer
from mpistrat.checkpoint.tree import Node, Spec, Tree, listed
from mpistrat.communicator.communicator import job_communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.validate import checked_int
from mpistrat.context.stack import default_mode, get_strategy, has_strategy, in_cross_replica_context, inside, misplaced
from mpistrat.device.binding import bound_device
from mpistrat.device.cuda import address
from mpistrat.errors import AgreementError, CheckpointError, InvalidArgumentError
from mpistrat.inputs.distribute import DistributedDataset
from mpistrat.inputs.sources import Dataset, DatasetIterator, Resumable
from mpistrat.launch.environment import detect
from mpistrat.parameter_server.client import open_clients
from mpistrat.state.variables import Variable
from mpistrat.text import ranks_text

_RESERVED = "__metadata__"
_BROADCAST_BYTES = 8 << 20  # of small arrays at once: few enough to be copied out of a cache
_COMPARED_BYTES = 1 << 6  # of each array, before ranks save parts of it together: each element is a cache miss


class PerRank:
    """A value of a checkpoint that each rank has for itself, such as a random generator. It comes back on as many ranks.

    Parameters
    ----------
    value : array, object with state_dict and load_state_dict, numpy.random.Generator, dict or list
        As for a `Checkpoint`, but without variables. This rank alone writes it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class Checkpoint:
    """Objects whose state is saved to files and restored from them. Making one is a collective call.

    The strategy in whose scope it is made says which ranks save together; outside all scopes these are all ranks of the job.
    Each writes an equal share of the bytes, and any number of ranks restores them. Values are those that all ranks have in
    common: arrays, numbers, random generators, and variables that were made outside all scopes must be equal on all ranks,
    unless they are `PerRank`, which variables cannot be; of variables synchronized ON_READ the aggregated value is saved.

    Parameters
    ----------
    **objects : Variable, array, object with state_dict and load_state_dict, numpy.random.Generator, dict, list or PerRank
        What is saved, by name: variables, also those on servers; writable arrays; modules, optimizers and schedulers of
        PyTorch; datasets or their iterators, whose position in an epoch is saved; dicts and lists of these, of numbers and of
        texts. They are restored in place.

    Raises
    ------
    InvalidArgumentError
        If a value is a number, a text or a tuple, which cannot be restored in place, contains itself, or belongs to another
        strategy, or if two of them have the position of one dataset.
    AgreementError
        On all ranks, if they have different objects, or one cannot save them.
    """

    def __init__(self, **objects: Any) -> None:
        self._strategy, view = get_strategy(), detect()
        is_of_job = not has_strategy() and view is not None and view.has_peers
        for client in open_clients() if is_of_job else ():
            raise _in_no_scope(f"the other ranks serve {client.strategy!r}, and cannot save with this one")
        communicator = job_communicator() if is_of_job else self._strategy.extended.communicator
        self._communicator: BaseCommunicator = communicator
        own = {name: each for name, each in objects.items() if isinstance(each, PerRank)}
        self._common = {name: each for name, each in objects.items() if name not in own}
        self._own = {_of_rank(name, communicator.rank): each.value for name, each in own.items()}
        self._objects = {**self._common, **self._own}
        self._communicator.agree_on("Checkpoint", self._checked)
        self._writer = Writer(self._communicator)
        self._memory: Array = np.empty(0, np.uint8)
        self._saved: list[Path] = []  # the last folder that is durable

    def save(self, path: str | os.PathLike[str], wait: bool = False, step: int = 0) -> str:
        """Save to a new folder, and return its path. A collective call.

        It returns when the values have been copied to host memory; a thread writes them. Another save waits for that first.

        Parameters
        ----------
        path : path
            A folder that does not exist, the same on all ranks, on a file system that they share.
        wait : bool
            Whether to wait until the checkpoint is durable.
        step : int
            What `restore` returns, from 0.

        Raises
        ------
        CheckpointError
            On all ranks, if one cannot write to the folder; what the thread finds is raised by the next call, `close`, or at
            exit. What was saved before stays whole.
        AgreementError
            On all ranks, if they save different things, or one cannot save them.
        """
        return self._save_to(path, wait, step)

    def _save_to(
        self,
        path: str | os.PathLike[str],
        wait: bool,
        step: int,
        outdated: Sequence[Path] = (),
        when_durable: Callable[[], None] = lambda: None,
    ) -> str:
        """Save, and remove older folders once that is durable; the next call that finds it so calls `when_durable`."""
        started, communicator = time.perf_counter(), self._communicator
        self._finish("save")
        tree, own, folder, step = self._compared(path, step)
        arrays = tree.arrays | {name: each.read() for name, each in tree.variables.items()} | own.arrays
        pieces = files.pieces_of(tuple(tree.specs.items()), communicator.rank, communicator.size)
        pieces += tuple(Piece(name, 0, spec.size) for name, spec in own.specs.items() if spec.size)
        document, specs = tree.document, dict(tree.specs)
        for nodes, others in (communicator.gather_objects((own.document[1], own.specs)) or []) if self._own else []:
            document[1].extend(nodes)
            specs.update(others)
        with self._failing_together():
            layout = files.layout_of(pieces, tree.specs | own.specs)
            memory = self._stage(layout, arrays)
            # the last rank: rank 0 has the first arrays, which in many models are many small ones, and takes longer
            made_in = files.prepare(folder) if communicator.rank == communicator.size - 1 else []
        manifest = Manifest(step, communicator.size, sys.modules["mpistrat"].__version__, document, specs, {})

        def tell() -> None:
            self._saved = [folder]
            when_durable()

        waited = time.perf_counter() - started
        self._writer.start(Save(folder, manifest, layout, memory, made_in, outdated, tell, waited, wait))
        if wait:
            self._writer.finish()
        return str(folder)

    def _compared(self, path: str | os.PathLike[str], step: int) -> tuple[Tree, Tree, Path, int]:
        """Return what objects of all ranks and of this one hold, and where to save it, once ranks are known to agree."""
        communicator, failed, call, digest = self._communicator, None, "Checkpoint.save", 0
        most_bytes = None if communicator.is_strict else _COMPARED_BYTES
        try:
            tree, own, step = Tree(self._common), Tree(self._own), checked_int(step, "step", 0)
            call = f"{call}({os.fspath(path)!r}, step={step})"
            folder = Path(path).absolute()  # the program may change its working directory before the thread has written
            digest = tree.digest(most_bytes, call)
        except Exception as error:
            failed = error
        communicator.note("Checkpoint.save")
        facts = np.array([failed is not None, digest, -digest])  # one small message; ranks that agree send no other
        if communicator.all_reduce("max", facts).tolist() != [0, digest, -digest]:
            communicator.agree(call, failed)
            gathered = communicator.gather_objects(tree.digests(most_bytes, call))
            raise AgreementError(communicator.broadcast_object(gathered and _differences(gathered)))
        return tree, own, folder, step

    def restore(self, path: str | os.PathLike[str], strict: bool = True) -> int:
        """Restore all objects from a folder, and return the step that was saved there. A collective call.

        Nothing is changed before every rank has read its share and compared checksums.

        Parameters
        ----------
        path : path
            A folder that `save` has returned.
        strict : bool
            Whether all arrays must be there, and no others. Shapes and dtypes must always be equal.

        Raises
        ------
        CheckpointError
            On all ranks, if the folder is no whole checkpoint, or does not fit these objects: all reasons are told at once.
        """
        communicator = self._communicator
        self._finish("restore")
        folder = communicator.agree_on("Checkpoint.restore", lambda: (Path(path), f"{os.fspath(path)!r}, strict={strict}"))
        with self._failing_together():
            found = files.read_manifest(folder) if communicator.rank == 0 else None
        manifest: Manifest = communicator.broadcast_object(found)
        with self._failing_together():
            tree = Tree(self._objects)
            document, specs = self._for_this_rank(manifest, strict)
            tree.check(specs, document, strict)
            targets = tree.targets(document)
        values = self._read(folder, manifest, targets)
        with self._failing_together():
            tree.restore(document, values)
        with inside(default_mode()):  # a variable may have been made outside the scope in which this is called
            for name, variable in tree.variables.items():
                if name in values:
                    variable.assign(values[name])
        return manifest.step

    def close(self) -> None:
        """Wait until the last save is durable, and free what is held. A collective call.

        Raises
        ------
        CheckpointError
            On all ranks, if the last save has failed.
        """
        self._writer.close()
        self._memory = np.empty(0, np.uint8)

    def _finish(self, method: str) -> None:
        """Wait for the last save, before a method that cannot be called on a closed checkpoint or inside ``run``."""
        if self._writer.is_closed:
            raise RuntimeError("the checkpoint was closed: close it once, after the last save or restore, also by a manager")
        if has_strategy() and not in_cross_replica_context():
            raise misplaced(f"checkpoint.{method}", "outside strategy.run")
        self._writer.finish()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raise a CheckpointError on all ranks, if one of them raises in the ``with`` block. A collective call."""
        rank, mine, cause = self._communicator.rank, "", None
        try:
            yield
        except CheckpointError as error:
            mine = str(error)
        except Exception as error:
            mine, cause = f"rank {rank}: {type(error).__name__}: {error}", error
        if not self._communicator.all_reduce("max", np.array([bool(mine)])):
            return
        gathered = self._communicator.all_gather(np.frombuffer(f"{mine}\0".encode(errors="backslashreplace"), np.uint8))
        told = list(dict.fromkeys(filter(None, gathered.tobytes().decode().split("\0"))))
        raise CheckpointError("; ".join(told)) from cause

    def _for_this_rank(self, manifest: Manifest, is_strict: bool) -> tuple[Node, dict[str, Spec]]:
        """Return the document and the arrays without what other ranks have for themselves; without all, if ranks are others."""
        rank, size = self._communicator.rank, self._communicator.size
        others = [_of_rank("", each) for each in range(manifest.num_ranks) if each != rank or size != manifest.num_ranks]
        names = {name for name, _ in manifest.document[1] if name.endswith(tuple(others))}
        if names and size != manifest.num_ranks and is_strict:
            raise CheckpointError(
                f"{', '.join(sorted(names))}: each of {manifest.num_ranks} ranks has saved its own, and here are {size}. "
                "strict=False leaves what they have"
            )
        nodes = [[name, node] for name, node in manifest.document[1] if name not in names]
        theirs = _beginnings(names)
        return ["dict", nodes], {name: spec for name, spec in manifest.arrays.items() if not f"{name}/".startswith(theirs)}

    def _checked(self) -> tuple[None, str]:
        tree, strategies = Tree(self._objects), (self._strategy, default_mode().strategy)
        tree.check_in_place()
        datasets = dict[int, str]()
        if _RESERVED in tree.specs:
            raise InvalidArgumentError(f"the name {_RESERVED} is reserved in files of safetensors: give the array another one")
        for name, value in {**tree.variables, **tree.states}.items():
            source = value.dataset if isinstance(value, DatasetIterator) else value
            if isinstance(source, Dataset) and source.is_distributed:
                raise InvalidArgumentError(
                    f"{name} was distributed, and its position is that of the distributed one.\n"
                    "    incorrect:  distributed = strategy.experimental_distribute_dataset(dataset); "
                    "mpistrat.Checkpoint(dataset=dataset)\n"
                    "    correct:    mpistrat.Checkpoint(dataset=distributed)"
                )
            if isinstance(source, Resumable) and datasets.setdefault(id(source), name) != name:
                raise InvalidArgumentError(
                    f"{datasets[id(source)]} and {name} have the position of one dataset: save one of them"
                )
            if isinstance(value, Variable) and f"{name}/".startswith(_beginnings(self._own)):
                raise InvalidArgumentError(f"{name} is a variable, which ranks save together: it cannot be PerRank")
            owner = getattr(source, "_strategy", None) if isinstance(source, (Variable, DistributedDataset)) else None
            if owner not in (None, *strategies):
                raise _in_no_scope(f"{name} belongs to {owner!r}, whose ranks must save it together")
        if taken := [name for name in self._common if name.rpartition("@")[2].isdecimal() and "@" in name]:
            raise InvalidArgumentError(f"{taken[0]} is a name as those of PerRank values are saved under: take one without @")
        own = [name.removesuffix(_of_rank("", self._communicator.rank)) for name in self._own]
        return None, ", ".join([*self._common, *(f"{name} of each rank" for name in own)])

    def _stage(self, layout: Layout, arrays: dict[str, Array]) -> Array:
        """Return a file in host memory, which the next save uses again. What lies on a GPU gets there by DMA."""
        memory, device = self._reserve(layout.num_bytes), bound_device()
        parts = [np.frombuffer(layout.header, np.uint8)]
        parts += [flat(arrays[name])[start:stop] for name, start, stop, _ in layout.pieces]
        if device is None:  # by one call: many arrays are small
            np.concatenate([part.view(np.uint8) for part in parts], out=memory[: layout.num_bytes])
            return memory
        stream, ends = device.current_stream(), np.cumsum([part.nbytes for part in parts])
        for part, end in zip(parts, ends.tolist(), strict=True):
            place = memory[end - part.nbytes : end]
            if is_on_device(part):
                stream.copy(address(place), address(part), part.nbytes)
            else:
                place[...] = part.view(np.uint8)
        event = stream.record()
        while not event.done():
            time.sleep(0)
        return memory

    def _read(self, folder: Path, manifest: Manifest, targets: dict[str, Array]) -> dict[str, Array]:
        """Return the arrays, which are `targets` or new: each rank reads its share of the files, and broadcasts what they hold.

        Targets are written to when all ranks have read their shares and compared checksums.
        """
        communicator = self._communicator
        mine: dict[str, Array] = {}
        with self._failing_together():
            layouts = files.layouts_of(manifest)
            paths = [folder / name for name in list(layouts)[communicator.rank :: communicator.size]]
            ends = [0, *accumulate(files.aligned(layouts[path.name].num_bytes) for path in paths)]
            memory = self._reserve(ends[-1])
            for path, begin, end in zip(paths, ends, ends[1:], strict=False):
                mine[path.name] = memory[begin:end]
                files.read_file(path, layouts[path.name], mine[path.name])
            specs = {name: spec for name, spec in manifest.arrays.items() if name not in targets}
            found = {name: np.empty(spec.shape, np.dtype(spec.dtype)) for name, spec in specs.items()} | targets
            received = np.empty(_BROADCAST_BYTES if manifest.pieces else 0, np.uint8)
        for number, (name, layout) in enumerate(layouts.items()):
            root = number % communicator.size
            for pieces, span in files.in_groups(layout, _BROADCAST_BYTES):
                parts = [as_bytes(found[piece.name].reshape(-1)[piece.start : piece.stop]) for piece in pieces]
                ends = np.cumsum([part.nbytes for part in parts]).tolist()
                source = received[: ends[-1]] if len(parts) > 1 else parts[0]
                if root == communicator.rank:
                    source = mine[name][span]
                communicator.broadcast(source, root, out=source)
                for part, end in zip(parts, ends, strict=True):
                    if part is not source:
                        part[...] = source[end - part.nbytes : end]
        return found

    def _reserve(self, num_bytes: int) -> Array:
        """Return memory of so many bytes, and what is left up to the next multiple of the alignment."""
        num_bytes, device = files.aligned(num_bytes), bound_device()
        if self._memory.nbytes < num_bytes:
            self._memory = files.new_memory(num_bytes, None if device is None else device.pinned)
        return self._memory[:num_bytes]


def _differences(digests: Sequence[dict[str, int]]) -> str:
    """Return what ranks are told that hold different values, of which each has a digest by its name."""
    first, texts = digests[0], list[str]()
    for name in dict.fromkeys(chain(*digests)):
        others = [rank for rank, found in enumerate(digests) if found.get(name) != first.get(name)]
        if others:
            verb = "does" if len(others) == 1 else "do"
            texts.append(f"{name}: {ranks_text(others)} {verb} not hold what rank 0 does")
    cure = (
        "make them equal, as mpistrat.torch.broadcast_state does with a module, or save those of each rank: "
        "mpistrat.Checkpoint(name=mpistrat.PerRank(value))"
    )
    return listed("a checkpoint has one value for all ranks, and these differ:", texts, [cure])


def _in_no_scope(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{why}.\n"
        "    incorrect:  mpistrat.Checkpoint(weights=weights)\n"
        "    correct:    with strategy.scope(): mpistrat.Checkpoint(weights=weights)"
    )


def _of_rank(name: str, rank: int) -> str:
    """Return the name under which a value of one rank is saved."""
    return f"{name}@{rank}"


def _beginnings(objects: Iterable[str]) -> tuple[str, ...]:
    """Return how the names of arrays begin, with a slash at their end, that objects with these names hold."""
    return tuple(f"{name}/" for name in objects)


class CheckpointManager:
    """The checkpoints of a job in a directory, of which the newest ones are kept. Making one is a collective call.

    Parameters
    ----------
    checkpoint : Checkpoint
        What is saved.
    directory : path
        A directory on a file system that all ranks share, of one job at a time. It is made by the first save.
    max_to_keep : int, optional
        How many checkpoints are kept, those of the highest steps; None keeps all.
    keep_every : int, optional
        Checkpoints whose step is a multiple of it are kept for ever, besides.

    Raises
    ------
    InvalidArgumentError
        If `checkpoint` is no Checkpoint, or a number is below 1.
    AgreementError
        On all ranks, if they pass different arguments.
    CheckpointError
        On all ranks, if the directory cannot be read.
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
        self._checkpoint, communicator = checkpoint, checkpoint._communicator
        checkpoint._finish("restore")
        files.join_started()  # of other managers, which may use the same directory

        def checked() -> tuple[Path, str]:
            for name, value in (("max_to_keep", max_to_keep), ("keep_every", keep_every)):
                if value is not None:
                    checked_int(value, name, 1)
            return Path(directory).absolute(), f"{os.fspath(directory)!r}, max_to_keep={max_to_keep}, keep_every={keep_every}"

        self._directory = communicator.agree_on("CheckpointManager", checked)
        self._max_to_keep, self._keep_every = max_to_keep, keep_every
        with checkpoint._failing_together():
            which = (False, True) if communicator.rank == 0 else ()
            found = [files.find_checkpoints(self._directory, interrupted) for interrupted in which]
        self._found: list[Path]
        self._found, self._interrupted = communicator.broadcast_object(found)

    @property
    def directory(self) -> str:
        """The directory."""
        return str(self._directory)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are kept, by their steps: those that were durable at the last call of a method."""
        return list(map(str, self._found))

    @property
    def latest_checkpoint(self) -> str | None:
        """The last one of `checkpoints`; None if there is none."""
        return str(self._found[-1]) if self._found else None

    def save(self, step: int, wait: bool = False) -> str:
        """Save to a folder of the directory, and return its path. A collective call: see `Checkpoint.save`.

        Once the checkpoint is durable, those that are not kept are removed; at once, what saves left that were interrupted.
        """
        self._checkpoint._finish("save")
        communicator = self._checkpoint._communicator
        try:
            number = checked_int(step, "step", 0)
        except Exception:  # which the checkpoint raises, on all ranks together
            number = 0
        if self._interrupted:
            with self._checkpoint._failing_together():
                if communicator.rank == 0:
                    files.join_started()  # of other managers, which may have saved to such a folder since
                    files.discard([each for each in self._interrupted if not (each / files.MANIFEST).is_file()])
        # another manager may have saved this step there, that of a PreemptionCheckpointHandler for example
        others = [each for each in self._checkpoint._saved if each.parent == self._directory]
        folder = files.new_folder(self._directory, number, [*self._found, *others])
        kept = self._kept_with(folder, number)
        outdated = [each for each in self._found if each not in kept]
        self._interrupted = []

        def add() -> None:
            self._found = kept

        return self._checkpoint._save_to(folder, wait, step, outdated, add)

    def restore(self, strict: bool = True) -> int | None:
        """Restore the newest checkpoint, and return its step; None if there is none. A collective call.

        See `Checkpoint.restore` for `strict` and the errors.
        """
        self._checkpoint._finish("restore")
        if not self._found:
            return None
        try:
            return self._checkpoint.restore(self._found[-1], strict)
        except CheckpointError as error:
            if len(self._found) == 1:
                raise
            before = f"the one before is {self._found[-2]}: checkpoint.restore(manager.checkpoints[-2])"
            raise CheckpointError(f"{error}\n    {before}, or delete the folder of the newest one if it is damaged") from error

    def close(self) -> None:
        """Close the checkpoint: see `Checkpoint.close`. A collective call."""
        self._checkpoint.close()

    def _kept_with(self, folder: Path, step: int) -> list[Path]:
        """Return the checkpoints that are kept when a new one has been saved, which replaces that of its step."""
        every = self._keep_every
        found = sorted([each for each in self._found if files.place_of(each)[0] != step] + [folder], key=files.place_of)
        passing = [each for each in found if every is None or files.place_of(each)[0] % every]
        gone = [] if self._max_to_keep is None else passing[: -self._max_to_keep]
        return [each for each in found if each == folder or each not in gone]
