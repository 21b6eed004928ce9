"""What a rank does to files, written down or made to fail, and what a disk may hold when all stops."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, count, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mpistrat.checkpoint import files

State = dict[str, bytes | None]  # files with what they hold, and folders
_MOST_SUBSETS = 6  # of so many changes each subset may be lost
_CHANGES = [(os, "fsync"), *((Path, name) for name in ("rename", "unlink", "mkdir", "rmdir", "write_text"))]


class Step(NamedTuple):
    """Something that a rank has done: to files, or with other ranks (``send``, ``receive``, ``start``)."""

    kind: str
    path: str = ""
    value: Any = None  # the bytes written, the new name, the other rank, or the step saved
    when: int = 0


class Recorder:
    """Writes down what this rank does to the files below a folder, for as long as `patch` lasts."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.steps: list[Step] = []
        self.before: Callable[[str, Path], None] = lambda kind, path: None
        self._root = root
        for owner, name in _CHANGES:
            patch.setattr(owner, name, self._recording(name, getattr(owner, name)))
        opened = Path.open
        patch.setattr(Path, "open", lambda path, *given, **named: self._opened(path, opened(path, *given, **named), *given))
        for name in ("_send", "_receive"):
            patch.setattr(files.Writer, name, self._meeting(name[1:], getattr(files.Writer, name)))
        start = files.Writer.start
        patch.setattr(files.Writer, "start", lambda each, *given: self.add("start") or start(each, *given))

    def add(self, kind: str, path: str = "", value: Any = None) -> None:
        self.steps.append(Step(kind, path, value, time.monotonic_ns()))

    def add_write(self, path: Path) -> None:
        """Write down what a file holds now."""
        self.add("write", str(path.relative_to(self._root)), path.read_bytes())

    def _opened(self, path: Path, file: Any, mode: str = "r", *_: Any) -> Any:
        is_here = "b" in mode and "w" in mode and path.is_relative_to(self._root)
        return _File(self, path, file) if is_here else file

    def _recording(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        kind = {"fsync": "sync", "write_text": "write"}.get(name, name)

        def recording(place: Any, *given: Any, **named: Any) -> Any:
            path = Path(f"/proc/self/fd/{place}").readlink() if name == "fsync" else Path(place)
            if not path.is_relative_to(self._root):
                return call(place, *given, **named)
            self.before(kind, path)
            was_there = path.exists()
            result = call(place, *given, **named)
            at = str(path.relative_to(self._root))
            if kind == "write":
                self.add_write(path)
            elif kind == "rename":
                self.add(kind, at, str(given[0].relative_to(self._root)))
            elif kind == "sync" or was_there != path.exists():
                self.add(kind, at)
            return result

        return recording

    def _meeting(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def meeting(each: Any, *given: Any) -> Any:
            if kind == "send":  # it has been sent as soon as the other one can have it
                self.add(kind, value=given[-1])
            result = call(each, *given)
            if kind == "receive":
                self.add(kind, value=given[-1])
            return result

        return meeting


class _File:
    def __init__(self, recorder: Recorder, path: Path, file: Any) -> None:
        self._recorder, self._path, self._file = recorder, path, file

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> Any:
        self._recorder.before("write", self._path)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()
        self._recorder.add_write(self._path)


def cuts(logs: Sequence[Sequence[Step]]) -> Iterator[tuple[int, ...]]:
    """Yield all moments at which ranks can be: how many of its steps each has taken."""
    first = (0,) * len(logs)
    found, coming = {first}, [first]
    while coming:
        cut = coming.pop()
        yield cut
        for rank, log in enumerate(logs):
            if cut[rank] < len(log) and _is_possible(logs, cut, rank):
                after = (*cut[:rank], cut[rank] + 1, *cut[rank + 1 :])
                if after not in found:
                    found.add(after)
                    coming.append(after)


def after_stop(steps: Sequence[Step]) -> Iterator[State]:
    """Yield what a disk may hold after these steps, in their order: all of it, or without what was not synchronized.

    A file that was not holds nothing, a half, or all; of the changes of names that were not, any may be lost: of many changes
    those are tried of which all but one, one, or the first ones were kept.
    """
    disk = _Disk(steps)
    pending = [number for number in range(len(disk.changes)) if number not in disk.durable]
    for kept in _subsets(pending):
        numbers = sorted({*disk.durable, *kept})
        folders: dict[int, dict[str, int]] = {number: {} for number in disk.folders}
        for number in numbers:
            folder, names = disk.changes[number]
            for name, inode in names.items():
                if inode is None:
                    folders[folder].pop(name, None)
                else:
                    folders[folder][name] = inode
        seen = dict(_walk(folders, 0, ""))
        unsafe = [path for path, inode in seen.items() if inode in disk.content and inode not in disk.safe]
        for lengths in product((0.0, 0.5, 1.0), repeat=len(unsafe)):
            state = {path: disk.content.get(inode) for path, inode in seen.items()}
            for path, length in zip(unsafe, lengths, strict=True):
                whole = state[path] or b""
                state[path] = whole[: int(len(whole) * length)]
            yield state


class _Disk:
    """Folders and files by number, each change of a name, and what of it is durable."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.folders, self.content = {0}, dict[int, bytes]()
        self.changes: list[tuple[int, dict[str, int | None]]] = []
        self.durable, self.safe = set[int](), set[int]()
        self._paths, self._inodes = {"": 0}, count(1)
        for step in steps:
            if method := getattr(self, f"_{step.kind}", None):
                method(step.path if step.path != "." else "", step.value)

    def _mkdir(self, path: str, _: None) -> None:
        self.folders.add(self._named(path))

    def _write(self, path: str, content: bytes) -> None:
        self.content[self._paths.get(path) or self._named(path)] = content

    def _rename(self, path: str, other: str) -> None:
        inode = self._paths[other] = self._paths.pop(path)
        self.changes.append((self._folder(path), {Path(path).name: None, Path(other).name: inode}))

    def _unlink(self, path: str, _: None) -> None:
        del self._paths[path]
        self.changes.append((self._folder(path), {Path(path).name: None}))

    _rmdir = _unlink

    def _sync(self, path: str, _: None) -> None:
        inode = self._paths[path]
        self.safe.add(inode)
        self.durable.update(number for number, (folder, _) in enumerate(self.changes) if folder == inode)

    def _named(self, path: str) -> int:
        inode = self._paths[path] = next(self._inodes)
        self.changes.append((self._folder(path), {Path(path).name: inode}))
        return inode

    def _folder(self, path: str) -> int:
        parent = str(Path(path).parent)
        return self._paths["" if parent == "." else parent]


def write_state(state: State, root: Path) -> None:
    for path, content in state.items():
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def _is_possible(logs: Sequence[Sequence[Step]], cut: tuple[int, ...], rank: int) -> bool:
    """Return whether a rank can take its next step before others take theirs."""
    kind, _, other, _ = logs[rank][cut[rank]]
    if kind == "receive":
        received = sum((step.kind, step.value) == (kind, other) for step in logs[rank][: cut[rank]])
        return sum((step.kind, step.value) == ("send", rank) for step in logs[other][: cut[other]]) > received
    if kind == "start":  # all have come to it
        started = sum(step.kind == kind for step in logs[rank][: cut[rank]])
        places = ([place for place, step in enumerate(log) if step.kind == kind][started] for log in logs)
        return all(place <= reached for place, reached in zip(places, cut, strict=True))
    return True


def _subsets(numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if len(numbers) <= _MOST_SUBSETS:
        for size in range(len(numbers) + 1):
            yield from combinations(numbers, size)
        return
    for place, number in enumerate(numbers):
        yield tuple(numbers[:place])
        yield (number,)
        yield (*numbers[:place], *numbers[place + 1 :])
    yield tuple(numbers)


def _walk(folders: dict[int, dict[str, int]], inode: int, path: str) -> Iterator[tuple[str, int]]:
    for name, each in folders[inode].items():
        below = f"{path}/{name}" if path else name
        yield below, each
        if each in folders:
            yield from _walk(folders, each, below)
