"""The files of a checkpoint, a folder with one file of arrays for each rank that has written, and a manifest; and their writer.

A folder without its manifest is not a checkpoint. Each file is durable before the manifest is written, and that is renamed into
its place once it is durable itself. So what has a manifest is whole, whenever the job or the machine has stopped.
A thread of each rank writes while the job goes on; the threads of all ranks meet by messages.

Arrays are cut by bytes into as many parts as there are ranks. A file of `safetensors` has the pieces of one part, each as an
array with one axis, under the name of the whole; the manifest says which elements they are, and has their checksums.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from errno import EFAULT, EINVAL
from fcntl import F_GETFL, F_SETFL, fcntl
from functools import lru_cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from mpistrat import ending
from mpistrat.arrays import Array
from mpistrat.checkpoint.tree import Node, Spec, itemsize_of
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.device.cuda import address
from mpistrat.errors import CheckpointError
from mpistrat.launch import abort, end_of_job
from mpistrat.logger import logger
from mpistrat.text import format_bytes, format_seconds
from mpistrat.watch.recorder import watched

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # the same checksums, in eight times as long
    from zlib import crc32

FORMAT = 2
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"ckpt-(\d+)(?:\.(\d+))?")
_OURS = re.compile(rf"arrays-\d+\.safetensors|{re.escape(MANIFEST)}(\.new)?")
# what all versions of safetensors hold, and how they call it; other arrays are stored as bytes
_STORED = {
    **{f"{kind}{bits}": f"{letter}{bits}" for kind, letter in (("int", "I"), ("uint", "U")) for bits in (8, 16, 32, 64)},
    **{"bool": "BOOL", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
}
ALIGNMENT = 1 << 12
"""Of memory that a disk reads by itself, and of where it writes that in a file, in bytes."""
_CHECKED_BYTES = 1 << 18  # at a time
_PATIENCE = 5  # until checksums take cores from steps that do not wait: so many times as long as the write has taken
_MOVED_BYTES = 8 << 20  # at a time
_DIRECT_BYTES = 128 << 20  # at a time, where the disk reads memory by itself: each call takes a core for 0.1 ms
_POLL_SECONDS = 0.002
_NICER = 10
"""By how much the thread that writes is nicer than the program: where steps take all cores, they lose a quarter less to it."""
_writers = WeakSet["Writer"]()
_started = set["Writer"]()  # until somebody has seen how it has ended


class Piece(NamedTuple):
    """Some elements of an array that lie in one file, and their checksum, once it is known."""

    name: str
    start: int
    stop: int
    checksum: int | None = None


class Manifest(NamedTuple):
    """What a checkpoint holds: see `checkpoint.tree` for the document; `pieces` are those of each file."""

    step: int
    num_ranks: int
    version: str
    document: Node
    arrays: dict[str, Spec]
    pieces: dict[str, list[Piece]]

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(spec.size * spec.itemsize for spec in self.arrays.values())


class Layout(NamedTuple):
    """A file in the format of safetensors: the pieces as they lie in it, its header, where each piece lies, and its bytes."""

    pieces: list[Piece]
    header: bytes
    places: list[slice]
    num_bytes: int


@lru_cache(maxsize=8)
def pieces_of(arrays: tuple[tuple[str, Spec], ...], part: int, num_parts: int) -> tuple[Piece, ...]:
    """Return the pieces of one part of arrays: parts have equal bytes, up to an element."""
    sizes = {name: (spec.size, spec.itemsize) for name, spec in arrays}
    total = sum(size * itemsize for size, itemsize in sizes.values())
    bounds = total * part // num_parts, total * (part + 1) // num_parts
    pieces, begin = [], 0
    for name, (size, itemsize) in sizes.items():
        nbytes = size * itemsize
        start, stop = (min(max(bound - begin, 0), nbytes) // itemsize for bound in bounds)
        if start < stop:
            pieces.append(Piece(name, start, stop))
        begin += nbytes
    return tuple(pieces)


def file_name(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"arrays-{rank:05d}.safetensors"


def checksum_meanwhile(data: Array, ends: float) -> int:
    """Return a checksum, and leave the core to the program after each part of the data, until `time.perf_counter` is `ends`.

    A step that yields its core while it waits for another rank would else get it back at the next tick of the clock.
    """
    checksum = 0
    for begin in range(0, len(data), _CHECKED_BYTES):
        if time.perf_counter() >= ends:  # the rest at once: after each part the thread waits for the interpreter
            return crc32(data[begin:], checksum)
        checksum = crc32(data[begin : begin + _CHECKED_BYTES], checksum)
        os.sched_yield()
    return checksum


def write_file(path: Path, memory: Array, num_bytes: int) -> None:
    """Write the first bytes of aligned memory to a durable file. There is room up to the next multiple of the alignment.

    The library would write to a file of another name, which stays there if the job is stopped, and compute no checksums.
    """
    with _opened(path, "wb") as file:
        _move(file, file.write, memory)
        file.truncate(num_bytes)
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path, layout: Layout, memory: Array | None = None) -> None:
    """Read a file into aligned memory, up to its next multiple, or only to look at it: it must be what was written."""
    pieces, header, places, size = layout
    parts: list[tuple[str, slice, int | None]] = [("its header", slice(0, len(header)), crc32(header))]
    parts += [(piece.name, place, piece.checksum) for piece, place in zip(pieces, places, strict=True)]
    scratch = new_memory(_MOVED_BYTES) if memory is None else memory
    number = checksum = 0
    with _reading(path), _opened(path, "rb") as file:
        if (found := path.stat().st_size) != size:
            raise EOFError(f"it has {found} bytes, and was written with {size}")
        for begin in range(0, aligned(size), _MOVED_BYTES):
            chunk = scratch[: aligned(size) - begin] if memory is None else memory[begin : begin + _MOVED_BYTES]
            stop = begin + _move(file, file.readinto, chunk)
            for name, place, wanted in parts[number:]:
                checksum = crc32(chunk[max(place.start - begin, 0) : place.stop - begin], checksum)
                if place.stop > begin + len(chunk):
                    break
                if place.stop > stop or checksum != wanted:
                    raise CheckpointError(f"{path}: the bytes of {name} are not those that were written")
                number, checksum = number + 1, 0


def _opened(path: Path, mode: str) -> Any:
    """Open a file that the disk reads or writes by itself, where the file system lets it (O_DIRECT).

    The kernel's copies would take cores from the steps meanwhile.
    """
    file = path.open(mode, buffering=0)
    with suppress(OSError):
        fcntl(file, F_SETFL, fcntl(file, F_GETFL) | os.O_DIRECT)
    return file


def _move(file: Any, move: Callable[[Array], int], memory: Array) -> int:
    """Write memory to a file by `move`, or read into it, and return how many bytes there were."""
    done = 0
    while done < len(memory):
        flags = fcntl(file, F_GETFL)
        try:
            count = move(memory[done : done + (_DIRECT_BYTES if flags & os.O_DIRECT else _MOVED_BYTES)])
        except OSError as error:
            if error.errno not in (EINVAL, EFAULT) or not flags & os.O_DIRECT:
                raise
            fcntl(file, F_SETFL, flags & ~os.O_DIRECT)  # such memory, or such a place in the file, is not for it
            continue
        if not count:
            break
        done += count
        if file.writable() and not flags & os.O_DIRECT:  # begin to write to the disk what was copied
            os.posix_fadvise(file.fileno(), done - count, count, os.POSIX_FADV_DONTNEED)
    return done


def new_memory(num_bytes: int, make: Callable[[int], Array] | None = None) -> Array:
    """Return so much aligned memory, of the host or of what ``make(bytes)`` returns."""
    memory = make(num_bytes + ALIGNMENT) if make else np.empty(num_bytes + ALIGNMENT, np.uint8)
    return memory[-address(memory) % ALIGNMENT :][:num_bytes]


def aligned(num_bytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def in_groups(layout: Layout, most_bytes: int) -> Iterator[tuple[list[Piece], slice]]:
    """Yield the pieces of a file in the order in which they lie there, as many at once as have so many bytes, or one."""
    group, start, stop = list[Piece](), layout.places[0].start, 0
    for piece, place in zip(layout.pieces, layout.places, strict=True):
        if group and place.stop - start > most_bytes:
            yield group, slice(start, stop)
            group, start = [], stop
        group.append(piece)
        stop = place.stop
    yield group, slice(start, stop)


def layouts_of(manifest: Manifest) -> dict[str, Layout]:
    """Return the layout of each file."""
    return {name: layout_of(tuple(pieces), manifest.arrays) for name, pieces in manifest.pieces.items()}


def layout_of(pieces: tuple[Piece, ...], arrays: Mapping[str, Spec]) -> Layout:
    """Return the layout of a file with pieces of arrays."""
    return _layout_of(pieces, tuple(arrays[piece.name].dtype for piece in pieces))


@lru_cache(maxsize=8)
def _layout_of(pieces: tuple[Piece, ...], dtypes: tuple[str, ...]) -> Layout:
    stored = [dtype if dtype in _STORED else "uint8" for dtype in dtypes]
    # so all of them are aligned
    ordered = sorted(zip(pieces, dtypes, stored, strict=True), key=lambda each: -itemsize_of(each[2]))
    fields, bounds = {}, [0]
    for piece, dtype, kept in ordered:
        nbytes = (piece.stop - piece.start) * itemsize_of(dtype)
        bounds.append(bounds[-1] + nbytes)
        fields[piece.name] = {"dtype": _STORED[kept], "shape": [nbytes // itemsize_of(kept)], "data_offsets": bounds[-2:]}
    text = json.dumps(fields).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    places = [slice(len(header) + begin, len(header) + end) for begin, end in pairwise(bounds)]
    return Layout([piece for piece, _, _ in ordered], header, places, len(header) + bounds[-1])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a checkpoint of a folder whose files are durable, and its name."""
    content = json.dumps(manifest._asdict())
    text = f'{{"format": {FORMAT}, "checksum": {crc32(content.encode())}, "content": {content}}}'
    new = folder / f"{MANIFEST}.new"
    _sync(folder)
    new.write_text(text)
    _sync(new)
    new.rename(folder / MANIFEST)
    _sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint."""
    path = folder / MANIFEST
    with _reading(path):
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            newer = ", or a newer one" if found["format"] > FORMAT else ""
            raise CheckpointError(
                f"{path} has format {found['format']}, and this version of mpistrat reads format {FORMAT}: use the version "
                f"that has written it{newer}"
            )
        fields: dict[str, Any] = found["content"]
        if crc32(json.dumps(fields).encode()) != found["checksum"]:
            raise CheckpointError(f"{path}: its bytes are not those that were written")
        fields["arrays"] = {name: Spec(dtype, tuple(shape)) for name, (dtype, shape) in fields["arrays"].items()}
        if any(np.dtype(spec.dtype).hasobject for spec in fields["arrays"].values()):  # bytes of a file are no addresses
            raise ValueError("an array of objects is in no checkpoint")
        fields["pieces"] = {name: [Piece(*piece) for piece in pieces] for name, pieces in fields["pieces"].items()}
        return Manifest(**fields)


def verify(folder: Path) -> Manifest:
    """Read all of a checkpoint, compare checksums, and return its manifest."""
    manifest = read_manifest(folder)
    for name, layout in layouts_of(manifest).items():
        read_file(folder / name, layout)
    return manifest


def new_folder(directory: Path, step: int, existing: Sequence[Path]) -> Path:
    """Return the folder for a step: a new one, also if that step was saved before."""
    turns = [turn for other, turn in map(place_of, existing) if other == step]
    return directory / (f"ckpt-{step:08d}" if not turns else f"ckpt-{step:08d}.{max(turns) + 1}")


def place_of(folder: Path) -> tuple[int, int]:
    """Return the step of a folder of `new_folder`, and which of that step it is."""
    found = _FOLDER.fullmatch(folder.name)
    return (int(found[1]), int(found[2] or 0)) if found else (-1, 0)


def find_checkpoints(directory: Path, interrupted: bool = False) -> list[Path]:
    """Return the checkpoints of a directory by their steps; or those of which a save or the removal was interrupted."""
    if not directory.is_dir():
        return []
    with _reading(directory):
        folders = [entry for entry in directory.iterdir() if _FOLDER.fullmatch(entry.name)]
        return sorted([each for each in folders if (each / MANIFEST).is_file() != interrupted], key=place_of)


def prepare(folder: Path) -> list[Path]:
    """Make an empty folder for a new checkpoint, in the place of an incomplete one; return the folders that have new names."""
    if folder.is_dir():
        if (folder / MANIFEST).exists():
            raise CheckpointError(f"{folder} is a checkpoint already: save to another folder")
        remove(folder)
        if folder.is_dir():
            raise CheckpointError(f"{folder} holds what is no part of a checkpoint: save to another folder")
    absent = list(takewhile(lambda path: not path.exists(), folder.parents))
    folder.mkdir(parents=True)
    return [path.parent for path in (folder, *absent)]


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first: what is left of it if that is interrupted is no checkpoint."""
    if not folder.is_dir():
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    _sync(folder)
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    if not any(folder.iterdir()):  # else somebody has put something there
        folder.rmdir()


def discard(folders: Sequence[Path]) -> None:
    """Remove checkpoints; the job goes on where one cannot be."""
    for each in folders:
        try:
            remove(each)
        except OSError as error:
            logger.warning(f"the older checkpoint {each} cannot be removed: {error}")


def _sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise what goes wrong as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        why = "it was not saved to its end, or parts of it were removed"
        raise CheckpointError(f"{path} does not exist: {path.parent} is no whole checkpoint, because {why}") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class Save(NamedTuple):
    """What a rank writes: memory that nobody changes, with its layout; rank 0 then writes the manifest, and removes `outdated`.

    The folder's name is durable once its rank has synchronized the folders `made_in`. `Writer.finish` calls `when_durable`, if
    all went well.
    """

    folder: Path
    manifest: Manifest
    layout: Layout
    memory: Array
    made_in: Sequence[Path]
    outdated: Sequence[Path]
    when_durable: Callable[[], None]
    seconds_waited: float  # of the step
    is_awaited: bool  # by the program, which does nothing else meanwhile


class Writer:
    """What writes the checkpoints of a communicator, one at a time. Making one is a collective call.

    What goes wrong on a rank before it starts to write is told to all. So all ranks start, and their threads find each other,
    also where a collective of the program has failed meanwhile: a wait ends, unless a file system hangs.
    """

    def __init__(self, communicator: BaseCommunicator) -> None:
        self.rank, self.size, self.is_closed = communicator.rank, communicator.size, False
        self._comm: Any = None  # ranks that are alone send nothing
        if isinstance(communicator, Communicator) and self.size > 1:
            self._comm = communicator.hierarchy.world_group.comm.Dup()
            self._members = communicator.hierarchy.members
            self._among = f"saves, communicator {communicator.hierarchy.number}"
        self.forget_thread()
        self._error = ""
        self._when_durable: Callable[[], None] = lambda: None
        self.longest_seconds = 0.0  # of the saves so far, without the time in which steps had the core
        _writers.add(self)

    def forget_thread(self) -> None:
        """Take another thread, which writes nothing: a forked child does not have that of its parent."""
        self._thread, self._saving = ThreadPoolExecutor(1, "mpistrat-checkpoint", _be_nicer), Future[None]()
        self._saving.set_result(None)

    def start(self, save: Save) -> None:
        """Write what is saved; `finish` waits for it."""
        self._when_durable, self._error = save.when_durable, f"rank {self.rank}: the thread that writes has ended"
        _started.add(self)
        try:
            self._saving = self._thread.submit(self._run, save)
            self._saving.add_done_callback(_tell_what_was_raised)
        except RuntimeError:  # there can be no more threads: this one writes, since those of the other ranks wait for that
            self.forget_thread()
            self._run(save._replace(is_awaited=True))

    def finish(self) -> None:
        """Wait until what was started is durable; raise CheckpointError on all ranks, if one of them could not write."""
        if self not in _started:
            return
        # on each rank, also if it need not wait: a rank that has not come to it is one that the others wait for
        with watched("Checkpoint: a save", self._members, self._among) if self._comm is not None else nullcontext():
            self.join()
        _started.discard(self)
        if self._error:
            raise CheckpointError(f"{self._error}. The last checkpoint before it is whole")
        self._when_durable()

    def join(self) -> None:
        """Wait until nothing is written."""
        self._saving.exception()  # which waits, and raises nothing

    def close(self) -> None:
        """Finish, and free the communicator. A collective call."""
        self.is_closed = True
        try:
            self.finish()
        finally:
            if self._comm is not None:
                self._comm.Free()
            self._comm = None
            self._thread.shutdown()

    def _run(self, save: Save) -> None:
        """Write, in the thread; rank 0 then tells it, and removes what is outdated."""
        if not save.is_awaited:
            time.sleep(_POLL_SECONDS)  # the call returns meanwhile: then this thread keeps the interpreter, until it writes
        started = time.perf_counter()
        self._error = self._write(save)
        seconds = time.perf_counter() - started
        if self.rank or self._error:
            return
        manifest, waited = save.manifest, format_seconds(save.seconds_waited)
        amount, rate = format_bytes(manifest.num_bytes), format_bytes(int(manifest.num_bytes / seconds))
        end_of_job.note_saved(manifest.step)
        logger.info(f"step {manifest.step}: {amount} in {save.folder}, at {rate}/s; the step waited {waited}")
        discard(save.outdated)

    def _write(self, save: Save) -> str:
        """Write, and return why it has failed on some rank, an empty text if it has not."""
        folder, layout, written, error = save.folder, save.layout, list[Piece](), ""
        started = time.perf_counter()
        try:
            if layout.pieces:
                write_file(folder / file_name(self.rank), save.memory, layout.num_bytes)
            for path in save.made_in:
                _sync(path)
            seconds, used = time.perf_counter() - started, time.thread_time()
            ends = started + _PATIENCE * seconds
            written = [
                piece._replace(checksum=checksum_meanwhile(save.memory[place], ends))
                for piece, place in zip(layout.pieces, layout.places, strict=True)
            ]
            seconds += save.seconds_waited + time.thread_time() - used
            self.longest_seconds = max(self.longest_seconds, seconds)
        except Exception as failed:
            error = _text(self.rank, folder, failed)
        if self.rank:
            self._send((written, error), 0)
            return str(self._receive(0))
        found = [(written, error), *map(self._receive, range(1, self.size))]
        error = "; ".join(text for _, text in found if text)
        try:
            if not error:
                every = {file_name(rank): each for rank, (each, _) in enumerate(found) if each}
                write_manifest(folder, save.manifest._replace(pieces=every))
        except Exception as failed:  # whatever it is, the others wait
            error = _text(0, folder, failed)
        if error:
            with suppress(OSError):  # what fails here has been told, or is removed by another save
                remove(folder)  # the disk may be full; and a manifest may be there that is not durable
        for rank in range(1, self.size):
            self._send(error, rank)
        return error

    def _send(self, value: Any, rank: int) -> None:
        request = self._comm.isend(value, rank)
        while not request.test()[0]:  # waiting in MPI would take a core from the program
            time.sleep(_POLL_SECONDS)

    def _receive(self, rank: int) -> Any:
        while (message := self._comm.improbe(rank)) is None:
            time.sleep(_POLL_SECONDS)
        return message.recv()


def _be_nicer() -> None:
    with suppress(OSError):  # Linux has a priority of each thread
        os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + _NICER, 19))


def _tell_what_was_raised(saving: Future[None]) -> None:
    """Have an uncaught exception end the job, as that of any thread: a pool keeps it, and the other ranks wait."""
    if error := saving.exception():
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread())))


def _text(rank: int, folder: Path, error: Exception) -> str:
    return f"rank {rank}: {folder} cannot be written: {type(error).__name__}: {error}"


def join_started() -> None:
    """Wait until this process writes nothing, for a look at folders; `Writer.finish` tells what has gone wrong."""
    for writer in list(_started):
        writer.join()


def _finish_started() -> None:
    for writer in list(_started):
        try:
            writer.finish()
        except CheckpointError as error:
            abort.end(error)


def _forget_threads() -> None:
    for writer in _writers:
        writer.forget_thread()
    _started.clear()


ending.at(ending.Stage.FINISH, _finish_started)
os.register_at_fork(after_in_child=_forget_threads)
