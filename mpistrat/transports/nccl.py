"""nccl: NVIDIA's collectives on a stream, over `cupy.cuda.nccl`.

Parts of equal size use NCCL's own reduce-scatter and all-gather; unequal ones a group of reduces or broadcasts, which NCCL
carries out together, as it does the sends and receives of an exchange. What moves without being combined moves as bytes.

Invariant: one thread issues all calls, in an order that is the same on all ranks, and kernels begin in that order, also those
of other communicators on the GPU. A communicator that failed, or whose operation was given up, is aborted: its kernels would
wait for the peers for ever.
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from mpistrat.device.abstract import Device, DeviceArray, Event, Stream, address
from mpistrat.device.kernels import PACKET_BYTES, computed_in, divide_kernel, fold_kernel, num_blocks, real_dtype
from mpistrat.errors import DeadlineExceededError, TransportError
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.group import Group
from mpistrat.reduction import HALF_DTYPES, Fold, ReduceOp
from mpistrat.steps import WAITING, Steps, until
from mpistrat.text import ranks_text
from mpistrat.transports.base import DeviceTransport, FlatArrays, Operation, Part, Watched

JOIN_SECONDS = 120.0
POLLS_PER_CHECK = 64
_POLL_SECONDS = 1e-4
CHECK_SECONDS, UNSEEN_SECONDS, IDLE_SECONDS = 0.02, 1.0, 1.0
STOP_SECONDS = 10.0  # the watcher may be aborting a communicator, which NCCL can block in

_TYPES = {
    "int8": "INT8",
    "uint8": "UINT8",
    "int32": "INT32",
    "uint32": "UINT32",
    "int64": "INT64",
    "uint64": "UINT64",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT32",
    "float64": "FLOAT64",
}
_OPS = {ReduceOp.SUM: "SUM", ReduceOp.MEAN: "SUM", ReduceOp.MIN: "MIN", ReduceOp.MAX: "MAX", ReduceOp.PROD: "PROD"}
# NCCL destroys a communicator on all ranks of a node together: garbage collection, at any moment of one rank, must not
_undisposed: set[Any] = set()
_OPS_OF_BOOL = {ReduceOp.SUM: "MAX", ReduceOp.MAX: "MAX", ReduceOp.MIN: "MIN", ReduceOp.PROD: "MIN"}


@cache
def native_type(dtype: np.dtype[Any], op: ReduceOp) -> tuple[str, int, str] | None:
    """Return how NCCL combines such values, or None: its type, how many of these make one value, and its operation."""
    if dtype.kind == "b":
        return "UINT8", 1, _OPS_OF_BOOL[op]
    if dtype.kind == "c" and op in (ReduceOp.SUM, ReduceOp.MEAN):
        return _TYPES[f"float{4 * dtype.itemsize}"], 2, "SUM"
    # NCCL's minimum and maximum pass NaN over
    loses_nan = (dtype.kind == "f" or dtype in HALF_DTYPES) and op in (ReduceOp.MIN, ReduceOp.MAX)
    return None if loses_nan or dtype.name not in _TYPES else (_TYPES[dtype.name], 1, _OPS[op])


def nccl_refusal(dtype: np.dtype[Any], op: ReduceOp) -> str:
    """Return why NCCL does not combine such values, or an empty text."""
    return "" if native_type(dtype, op) else f"NCCL does not combine {dtype} by {op.name} as this library defines it"


class NcclTransport(DeviceTransport):
    """The verbs of NCCL. Making one is a collective call.

    Raises TransportError on all ranks, if their versions differ, NCCL_COMM_BLOCKING is 0, NCCL finds no network, or not all
    have joined after two minutes.
    """

    name = "nccl"
    combines_arrays = True
    adds_in_order = combines_halves = True

    def __init__(self, group: Group, device: Device | None = None, library: Any = None) -> None:
        super().__init__(group, device)
        self._nccl = library or _cupy_nccl()
        self._stream = self.device.stream()
        # recorded again by each operation: what the caller's stream was given before it, and the end of the operation
        self._given: Event | None = None
        self._ended: Event | None = None
        self._failure, self._is_overdue, self._told_at = "", False, -math.inf
        self._connected: set[tuple[str, int]] = set()  # by point-to-point calls
        self._lock = threading.Lock()
        self._watcher: NcclWatcher | None = None
        self._comm = self._join()
        _undisposed.add(self._comm)

    @classmethod
    def probe(cls, group: Group) -> str:
        """Return why NCCL cannot join these ranks, or an empty text."""
        try:
            available = bool(_cupy_nccl().available)
        except ImportError as error:
            return f"CuPy cannot be imported ({error})"
        return "" if available else "CuPy finds no libnccl.so.2; pip install '.[cuda12]' in the checkout, or cuda13"

    def refusal(self, dtype: np.dtype[Any], op: ReduceOp) -> str:
        """Return what NCCL lacks to combine such values, or an empty text."""
        return nccl_refusal(dtype, op)

    def all_reduce(self, buffer: DeviceArray, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind ncclAllReduce, in place."""
        kind, width, native = self._native(buffer, op)
        start, count = address(buffer), buffer.size * width
        call = lambda comm, stream: comm.allReduce(start, start, count, kind, native, stream)  # noqa: E731
        return self._operation([call], [Part(0, buffer.size, (buffer,))])

    def all_reduce_arrays(self, arrays: FlatArrays, fold: Fold) -> Steps:
        """Combine arrays of the caller, after what its stream was given so far: ncclAllReduce of each, together."""
        kind, width, native = self._native(arrays.targets[0], fold.op)

        def bind(source: DeviceArray, target: DeviceArray) -> _Call:
            start, end, count = address(source), address(target), source.size * width
            return lambda comm, stream: comm.allReduce(start, end, count, kind, native, stream)

        yield from self._operation(list(map(bind, arrays.sources, arrays.targets)), []).run()
        for target in arrays.targets:
            self._divide(target, fold.divisor)

    def all_reduce_in_order(self, buffer: DeviceArray, op: ReduceOp) -> Operation:
        """Bind a group of ncclSend and ncclRecv, a kernel that adds, and an all-gather."""
        bounds = [rank * buffer.size // self.group.size for rank in range(self.group.size + 1)]
        gather = self.all_gather(buffer, bounds)
        return ordered_on_device(self.device, self.group.rank, buffer, bounds, op, self.exchange, gather)

    def reduce_scatter(self, buffer: DeviceArray, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind ncclReduceScatter in place, or one ncclReduce per part where parts differ."""
        own = slice(bounds[self.group.rank], bounds[self.group.rank + 1])
        calls = self._scatter_calls(buffer, bounds, address(buffer) + own.start * buffer.dtype.itemsize, op)
        return self._operation(calls, [Part(own.start, own.stop, (buffer[own],))])

    def scatter_between(self, source: DeviceArray, bounds: Sequence[int], target: DeviceArray, fold: Fold) -> Steps:
        """Combine arrays that share no memory; rank r gets elements ``bounds[r]:bounds[r + 1]``. A collective call."""
        yield from self._operation(self._scatter_calls(source, bounds, address(target), fold.op), []).run()
        self._divide(target, fold.divisor)

    def all_gather(self, buffer: DeviceArray, bounds: Sequence[int]) -> Operation:
        """Bind ncclAllGather in place, or one ncclBroadcast per part where parts differ."""
        kind = self._nccl.NCCL_UINT8
        starts = [address(buffer) + bound * buffer.dtype.itemsize for bound in bounds]
        counts = [(stop - start) * buffer.dtype.itemsize for start, stop in pairwise(bounds)]
        calls: list[_Call] = [
            lambda comm, stream, start=start, count=count, root=root: comm.broadcast(start, start, count, kind, root, stream)
            for root, (start, count) in enumerate(zip(starts, counts, strict=False))
        ]
        if _are_equal(bounds, buffer.size):
            source, count = starts[self.group.rank], counts[0]
            calls = [lambda comm, stream: comm.allGather(source, starts[0], count, kind, stream)]
        return self._operation(calls, [Part(0, buffer.size, (buffer,))])

    def broadcast(self, buffer: DeviceArray, root: int = 0) -> Operation:
        """Bind ncclBroadcast, in place."""
        kind, start, nbytes = self._nccl.NCCL_UINT8, address(buffer), buffer.nbytes
        call = lambda comm, stream: comm.broadcast(start, start, nbytes, kind, root, stream)  # noqa: E731
        return self._operation([call], [Part(0, buffer.size, (buffer,))])

    def exchange(self, sends: Sequence[DeviceArray], receives: Sequence[DeviceArray]) -> Steps:
        """Send an array of the caller to each peer, and receive one from each, all together. A collective call."""
        kind, rank, size = self._nccl.NCCL_UINT8, self.group.rank, self.group.size
        calls: list[_Call] = []
        pairs: set[tuple[str, int]] = set()
        for distance in range(1, size):  # each rank begins with the next one, so that not all send to one rank at first
            for verb, peer, array in (
                ("send", (rank + distance) % size, sends[(rank + distance) % size]),
                ("recv", (rank - distance) % size, receives[(rank - distance) % size]),
            ):
                if array.nbytes:
                    calls.append(_point_to_point(verb, address(array), array.nbytes, kind, peer))
                    pairs.add((verb, peer))
        if calls:
            yield from self._operation(calls, [], connects=not pairs <= self._connected).run()
            self._connected |= pairs

    def watch(self, watched: Watched) -> None:
        """Let operations end, from now on, when they are enqueued: the caller's stream waits for them, and not the host."""
        if self._watcher is None:
            self._watcher = NcclWatcher(f"nccl watcher {self.group.name}", self.device, self._check, self._give_up, watched)

    def raise_failure(self, grace_seconds: float = 0.0) -> None:
        """Raise TransportError if the communicator was aborted; other ranks have so long to say why they gave up."""
        if self._failure and time.monotonic() >= self._told_at + grace_seconds:
            if self._watcher is not None:
                self._watcher.note_raised()
            if self._is_overdue:
                raise DeadlineExceededError(f"{self._failure}; make a new strategy to go on")
            raise TransportError(f"{self.group.name}: NCCL has failed: {self._failure}; make a new strategy to go on")

    def settle(self) -> Steps:
        """Wait until all that was enqueued has ended, well or not."""
        return iter(()) if self._watcher is None else self._watcher.settle()

    def abort(self, reason: str) -> None:
        """Give the communicator up, with whatever is under way; every later use raises `reason`. The peers must do likewise."""
        with self._lock:
            self._abort(reason)

    def close(self) -> None:
        """Keep the communicator: other memory will be used with it."""

    def dispose(self) -> None:
        """Destroy the communicator, here and now: CuPy would do it when its object is collected, on whichever thread."""
        if self._watcher is not None:
            self._watcher.stop()
        if not self._failure:
            self._failure = "it was closed"
            self._comm.destroy()
        _undisposed.discard(self._comm)
        self._comm = None

    def _divide(self, values: DeviceArray, divisor: int) -> None:
        """Divide a mean; its kernel was prepared when the plan was bound."""
        if divisor > 1 and values.size:
            real = real_dtype(values.dtype)
            count = values.nbytes // real.itemsize
            arguments = address(values), count, computed_in(real).type(divisor)
            self.device.current_stream().launch(divide_kernel(real), num_blocks(count, real.itemsize), arguments)

    def _native(self, buffer: DeviceArray, op: ReduceOp) -> tuple[int, int, int]:
        native = native_type(buffer.dtype, op)
        if native is None:
            raise TransportError(f"{self.group.name}: {self.refusal(buffer.dtype, op)}; the transport cuda_ipc can")
        return getattr(self._nccl, f"NCCL_{native[0]}"), native[1], getattr(self._nccl, f"NCCL_{native[2]}")

    def _scatter_calls(self, source: DeviceArray, bounds: Sequence[int], target: int, op: ReduceOp) -> list[_Call]:
        """Return what combines sources, and writes this rank's part to an address: that of the part in the source, or apart."""
        kind, width, native = self._native(source, op)
        starts = [address(source) + bound * source.dtype.itemsize for bound in bounds]
        counts = [(stop - start) * width for start, stop in pairwise(bounds)]
        if _are_equal(bounds, source.size):
            return [lambda comm, stream: comm.reduceScatter(starts[0], target, counts[0], kind, native, stream)]
        return [
            lambda comm, stream, start=start, count=count, root=root: comm.reduce(
                start, target, count, kind, native, root, stream
            )
            for root, (start, count) in enumerate(zip(starts, counts, strict=False))
        ]

    def _operation(self, calls: Sequence[_Call], parts: list[Part], connects: bool = False) -> Operation:
        """Return what makes calls, after what the caller's stream was given so far; some may connect ranks first."""

        def run() -> Steps:
            self._check(asks_peers=self._watcher is None)
            current = self.device.current_stream()
            self._follow(current)
            watcher = self._watcher
            limit = None if watcher is None else watcher.begin_limit(self._stream)
            try:
                if connects:
                    yield from self._issue_apart(calls)
                else:
                    self._issue(calls)
                self._ended, polls = self._stream.record(self._ended), 0
                self.device.last_call = event = self._ended
                if watcher is not None and not watcher.watched.must_wait():
                    current.wait(event)
                    if limit is not None:
                        watcher.limit(limit, self._stream)
                    watcher.add(event)
                    return
                while not event.done():
                    polls += 1
                    if polls % POLLS_PER_CHECK == 0:
                        self._check()
                    yield WAITING
                self.raise_failure()
            except GeneratorExit:
                self.abort("it was given up while ranks were waiting for each other")
                raise

        return Operation(run, parts)

    def _follow(self, current: Stream) -> None:
        """Let what comes wait for what a stream was given so far, and for what NCCL was given on this GPU."""
        self._given = current.record(self._given)
        self._stream.wait(self._given)
        if self.device.last_call not in (None, self._ended):  # of another communicator, say
            self._stream.wait(self.device.last_call)

    def _issue(self, calls: Sequence[_Call]) -> None:
        if len(calls) == 1:
            calls[0](self._comm, self._stream.pointer)
            return
        self._nccl.groupStart()
        try:
            for call in calls:
                call(self._comm, self._stream.pointer)
        finally:
            self._nccl.groupEnd()

    def _issue_apart(self, calls: Sequence[_Call]) -> Steps:
        """Make calls on a thread of their own: NCCL connects ranks there, by a wait on the host that nothing ends."""
        failures: list[Exception] = []

        def issue() -> None:
            try:
                with self.device.activate():  # a new thread computes on GPU 0
                    self._issue(calls)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=issue, name=f"nccl {self.group.name}", daemon=True)
        thread.start()
        while thread.is_alive():
            yield WAITING
        if failures:
            self.abort(f"{failures[0]}" or type(failures[0]).__name__)
            self._check()

    def _check(self, asks_peers: bool = True) -> None:
        """Raise what NCCL has found out by itself, such as a broken link to a peer, or that a peer has aborted.

        To ask for that takes MPI some microseconds: an operation leaves it to the watcher.
        """
        with self._lock:
            if not self._failure:
                try:
                    self._comm.check_async_error()
                except Exception as error:  # CuPy raises KeyError for results that it has no name for
                    self._abort(f"{error}")
            if asks_peers and not self._failure and self._watcher is not None and self._watcher.watched.peer_has_aborted():
                self._told_at = time.monotonic()
                self._abort("another rank has given up")
        self.raise_failure()

    def _give_up(self, seconds: float) -> None:
        """Abort what is under way, and has been for longer than its deadline, and raise."""
        with self._lock:
            if not self._failure:
                self._is_overdue = True
                self._abort(
                    f"rank {self.group.ranks[self.group.rank]}, {self.group.name}: what NCCL was given has not ended within "
                    f"{seconds:.2g} s on the GPU, although all ranks came to the call: one has stopped after that, or a GPU, "
                    "or a link between GPUs, gets no further"
                )
        self.raise_failure()

    def _abort(self, reason: str) -> None:
        if not self._failure:
            self._failure = reason
            self._comm.abort()

    def _join(self) -> Any:
        """Make the communicator, on a thread of its own: NCCL waits for peers without an end."""
        if any(self.group.comm.allgather(os.environ.get("NCCL_COMM_BLOCKING") == "0")):
            raise TransportError("NCCL_COMM_BLOCKING=0 is set, which CuPy cannot handle; unset it")
        self._check_versions()
        # NCCL connects ranks where it is first used, by a wait on the host that nothing ends: here, on the thread below
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        values, identifier = self._trial_memory(), self._identifier()
        found: list[Any] = []

        def join() -> None:
            try:
                with self.device.activate():  # a new thread computes on GPU 0
                    comm = self._nccl.NcclCommunicator(self.group.size, identifier, self.group.rank)
                    try:
                        self._try_verbs(comm, values)
                    except Exception:
                        comm.abort()  # its kernels would wait for peers for ever
                        raise
                    found.append(comm)
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=join, name=f"nccl {self.group.name}", daemon=True)
        thread.start()
        thread.join(JOIN_SECONDS)
        problem = f"not all ranks had joined after {JOIN_SECONDS:g} s" if not found else ""
        if found and isinstance(found[0], Exception):
            problem = f"{found[0]}" or type(found[0]).__name__
        problems = self.group.comm.allgather(problem)
        failed = [rank for rank, text in zip(self.group.ranks, problems, strict=True) if text]
        if failed:
            if not problem:
                found[0].abort()
            text = next(filter(None, problems))
            raise TransportError(
                f"{self.group.name}: NCCL could not join {ranks_text(failed)}: {text}. NCCL_DEBUG=WARN shows more"
            )
        return found[0]

    def _try_verbs(self, comm: Any, values: DeviceArray) -> None:
        """Make the first call of each verb, and check the results.

        Raises TransportError if that is wrong.
        """
        # integers: the cube of the number of ranks need not be a float32
        size, kind, total = self.group.size, self._nccl.NCCL_INT64, self._nccl.NCCL_SUM
        self.device.put(values, np.ones(size, np.int64))
        self._follow(self.device.current_stream())
        start, stream = address(values), self._stream.pointer
        own = start + values.itemsize * self.group.rank
        comm.allReduce(start, start, size, kind, total, stream)
        comm.reduce(start, start, size, kind, total, 0, stream)
        comm.broadcast(start, start, size, kind, 0, stream)
        comm.reduceScatter(start, own, 1, kind, total, stream)
        comm.allGather(own, start, 1, kind, stream)
        event, ends = self._stream.record(), time.monotonic() + JOIN_SECONDS
        while not event.done():
            if time.monotonic() > ends:
                raise TransportError(f"its first sums had not ended after {JOIN_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        found = self.device.get(values)
        if not (found == size**3).all():
            raise TransportError(f"its first sums were wrong: {found.tolist()} in the place of {size**3}")

    def _trial_memory(self) -> DeviceArray:
        """Return memory for the first calls: where one rank has none, all must raise before they wait for it."""
        values, problem = None, ""
        try:
            values = self.device.allocate(8 * self.group.size).view(np.int64)
        except RuntimeError as error:  # a TransportError, or CUDA's own
            problem = f"{error}"
        problem = next(filter(None, self.group.comm.allgather(problem)), "")
        if problem:
            raise TransportError(problem)
        return values

    def _identifier(self) -> Any:
        """Return what names the communicator on all ranks; the first one has NCCL make it, which looks for a network then."""

        def find() -> Any:
            try:
                return self._nccl.get_unique_id()
            except Exception as error:
                raise TransportError(
                    f"{self.group.name}: NCCL could not begin on rank {self.group.ranks[0]}: {error}. NCCL_DEBUG=WARN shows "
                    "more, NCCL_SOCKET_IFNAME names the network interface"
                ) from error

        return bcast_or_raise(self.group.comm, find)

    def _check_versions(self) -> None:
        versions = self.group.comm.allgather(int(self._nccl.get_version()))
        if len(set(versions)) > 1:
            ranks = {version: [self.group.ranks[i] for i, v in enumerate(versions) if v == version] for version in versions}
            listed = ", ".join(f"{_version(version)} on {ranks_text(members)}" for version, members in ranks.items())
            raise TransportError(f"{self.group.name}: NCCL {listed}; install one version on all ranks")


_Call = Callable[..., None]


def _point_to_point(verb: str, start: int, nbytes: int, kind: int, peer: int) -> _Call:
    """Return the call that sends bytes to a peer, or receives them from it."""
    return lambda comm, stream: getattr(comm, verb)(start, nbytes, kind, peer, stream)


def _cupy_nccl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # `probe` reports a missing NCCL
        from cupy.cuda import nccl
    return nccl


def _are_equal(bounds: Sequence[int], count: int) -> bool:
    sizes = {stop - start for start, stop in pairwise(bounds)}
    return len(sizes) == 1 and bounds[0] == 0 and bounds[-1] == count


def _version(number: int) -> str:
    """Return ``2.28.9`` for NCCL's 22809."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def ordered_on_device(
    device: Device,
    rank: int,
    buffer: DeviceArray,
    bounds: Sequence[int],
    op: ReduceOp,
    exchange: Callable[[Sequence[DeviceArray], Sequence[DeviceArray]], Steps],
    gather: Operation,
) -> Operation:
    """Bind: fold the buffers of all ranks in the order of the ranks; every rank gets the same bits.

    As `pairwise.ordered_all_reduce` on the host: each rank gets its part of the buffers of all others, one kernel adds them in
    the order of the ranks, and all gather the sums.
    """
    size, itemsize = len(bounds) - 1, int(buffer.dtype.itemsize)
    parts = [buffer[start:stop] for start, stop in pairwise(bounds)]
    own = parts[rank]
    stride = -(-own.nbytes // PACKET_BYTES) * PACKET_BYTES
    received = device.allocate(max((size - 1) * stride, 1))
    places = iter(range(size - 1))
    # the addends of all ranks, in their order: this rank's own one lies in the buffer
    addends = [own if peer == rank else _at(received, next(places) * stride, own) for peer in range(size)]
    kernel, table = fold_kernel(buffer.dtype, op), device.allocate(8 * size)
    device.prepare(kernel)
    device.put(table, np.array([address(addend) for addend in addends], np.uint64).view(np.uint8))
    in_order = np.int32(0), max(own.size, 1), 0  # from rank 0 on, in one part
    arguments = address(table), np.int32(size), 0, address(own), own.size, *in_order

    def run() -> Steps:
        yield from exchange(parts, addends)
        if own.size:
            device.current_stream().launch(kernel, num_blocks(own.size, itemsize), arguments)
        yield from gather.run()

    return Operation(run, gather.parts, received.nbytes + table.nbytes)


def _at(memory: DeviceArray, offset: int, like: DeviceArray) -> DeviceArray:
    return memory[offset : offset + like.nbytes].view(like.dtype)


class NcclWatcher:
    """A thread that looks after NCCL calls that nobody waits for on the host, until they have ended.

    What NCCL should have written is undefined after an error. A program that makes no further collective would go on with it,
    to an optimizer or a checkpoint: so the thread raises if the program has not within a second, which ends the job
    (`launch.abort`).
    """

    def __init__(
        self,
        name: str,
        device: Device,
        check: Callable[[], None],
        give_up: Callable[[float], None],
        watched: Watched,
    ) -> None:
        self.device, self._check, self._give_up, self.watched = device, check, give_up, watched
        self._limited: deque[_Limited] = deque()
        self._spare: list[Event] = []  # events that nothing waits for any more
        # how many operations were added, how many have ended as far as is known, and the event that the last one recorded
        self._added = self._ended = 0
        self._event: Event | None = None
        self._has_work, self._is_raised, self._is_stopped = threading.Event(), threading.Event(), threading.Event()
        self._sleeps, self._has_failed = True, False
        # a daemon: a program that ends waits for nothing that was only enqueued
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def begin_limit(self, stream: Stream) -> _Limited | None:
        """Return the limit of what comes next on a stream, if the present operation has a deadline."""
        ends = self.watched.ends()
        return _Limited(stream.record(self._spare_event()), ends - time.monotonic()) if ends else None

    def limit(self, limited: _Limited, stream: Stream) -> None:
        """Look after the deadline of what was put on the stream since: it counts from when the GPU has come to that."""
        limited.ended = stream.record(self._spare_event())
        self._limited.append(limited)

    def _spare_event(self) -> Event | None:
        return self._spare.pop() if self._spare else None

    def add(self, event: Event) -> None:
        """Look after all that comes before an event, which each operation may record again."""
        self._event = event
        self._added += 1
        if self._sleeps:  # to wake a thread takes both ten microseconds
            self._has_work.set()

    def note_raised(self) -> None:
        """Note that the calling thread, if it is not this one, raises what has been found."""
        if threading.current_thread() is not self._thread:
            self._is_raised.set()

    def settle(self) -> Steps:
        """Return the steps that wait until all has ended, without waiting for the thread to look."""
        return until(self._has_ended)

    def stop(self) -> None:
        """End the thread; one that is blocked in NCCL is left behind."""
        self._is_stopped.set()
        self._has_work.set()
        self._is_raised.set()
        self._thread.join(STOP_SECONDS)

    def _has_ended(self) -> bool:
        """Return whether what was added before this call has ended."""
        added, event = self._added, self._event
        if self._ended < added and event is not None:
            with self.device.activate():  # the engine asks too, where it combines arrays of the host
                self._ended = added if event.done() else self._ended
        return self._has_failed or self._ended >= added

    def _work(self) -> None:
        with self.device.activate():  # a new thread computes on GPU 0
            while not self._is_stopped.is_set():
                if self._ended == self._added:
                    self._has_work.wait()
                self._has_work.clear()
                try:
                    self._look_after()
                except Exception:  # raised where the communicator is used next; nothing waits for what does not end
                    self._has_failed = True
                    if not self._is_raised_in_time():
                        raise
                    return
                finally:
                    self._sleeps = True

    def _is_raised_in_time(self) -> bool:
        ends = time.monotonic() + UNSEEN_SECONDS
        while not (self.watched.has_raised() or self._is_raised.wait(CHECK_SECONDS)):
            if time.monotonic() > ends:
                return False
        return True

    def _look_after(self) -> None:
        """Look every 20 ms, until nothing has been under way for a second; return early where the thread is to end."""
        self._sleeps, idle_since = False, time.monotonic()
        while not self._is_stopped.is_set() and time.monotonic() < idle_since + IDLE_SECONDS:
            if self._added > self._ended:
                idle_since = time.monotonic()
                if not self._has_ended():
                    self._check()
                self._look_at_deadlines()
            self._is_stopped.wait(CHECK_SECONDS)

    def _look_at_deadlines(self) -> None:
        while self._limited and (first := self._limited[0]).has_ended():
            self._limited.popleft()
            self._spare += first.begun, first.ended
        if self._limited and (first := self._limited[0]).is_overdue():
            self.watched.tell_peers()
            self._give_up(first.seconds)


class _Limited:
    """An operation with a deadline: events before and after it, and the seconds that it may take."""

    ended: Event

    def __init__(self, begun: Event, seconds: float) -> None:
        self.begun, self.seconds, self._since = begun, seconds, math.inf

    def has_ended(self) -> bool:
        return self.ended.done()

    def is_overdue(self) -> bool:
        now = time.monotonic()
        if self._since == math.inf and self.begun.done():
            self._since = now
        return now > self._since + self.seconds
