"""nccl: NVIDIA's collectives on a stream, over nccl4py or `cupy.cuda.nccl`.

Parts of equal size use NCCL's own reduce-scatter and all-gather; unequal ones a group of reduces or broadcasts, which NCCL
carries out together, as it does the sends and receives of an exchange. What moves without being combined moves as bytes.

Invariant: one thread issues all calls, in an order that is the same on all ranks, and kernels begin in that order, also those
of other communicators on the GPU. A communicator that failed, or whose operation was given up, is aborted: its kernels would
wait for the peers for ever.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arrays import part_bounds
from mpistrat.device.cuda import Allocator, Device, DeviceArray, Event, Stream, address
from mpistrat.device.kernels import PACKET_BYTES, divide_kernel, fold_kernel, num_blocks, real_dtype
from mpistrat.errors import DeadlineExceededError, TransportError
from mpistrat.groups.agreement import bcast_or_raise, gather_or_raise
from mpistrat.groups.group import Group
from mpistrat.logger import logger
from mpistrat.reduction import Fold, ReduceOp, accumulation_dtype
from mpistrat.steps import WAITING, Steps
from mpistrat.text import ranks_by, ranks_text
from mpistrat.transports.base import DeviceTransport, FlatArrays, Operation, Part, Watched
from mpistrat.transports.nccl_bindings import Nccl4py, connecting_first, find_binding, native_type, nccl_refusal, version_text
from mpistrat.transports.nccl_watcher import NcclWatcher

JOIN_SECONDS, ABORT_SECONDS, DESTROY_SECONDS = 120.0, 0.5, 5.0
TRIAL_BYTES = (1 << 20, 64 << 20)
"""Of the first sums besides one of few bytes: NCCL connects ranks anew for each of its algorithms, which depend on the size."""
_OF_WINDOWS = "NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE"
"""Switches of NCCL: where they are off, it returns from the registration that it waits in for all ranks elsewhere."""
POLLS_PER_CHECK = 64
_POLL_SECONDS = 1e-4

# NCCL destroys a communicator on all ranks of a node together: garbage collection, at any moment of one rank, must not
_undisposed: set[Any] = set()


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
        self._nccl = library or find_binding()
        self._allocator: Allocator | None = None
        if isinstance(self._nccl, Nccl4py):
            self._allocator = Allocator(self._nccl.allocator.allocate, self._leave)
        self._stream: Stream
        # recorded again by each operation: what the caller's stream was given before it, and the end of the operation
        self._given: Event | None = None
        self._ended: Event | None = None
        self._failure, self._is_overdue, self._told_at = "", False, -math.inf
        self._connected: set[tuple[str, int]] = set()  # by point-to-point calls
        self._lock = threading.RLock()
        self._watcher: NcclWatcher | None = None
        self._windows: dict[int, Any] = {}  # by the address of their memory, in the order in which all ranks have made them
        self._left: set[int] = set()  # such memory that no array is on any more
        self._is_captured = False  # so that there may be CUDA graphs with its calls
        self._comm: Any = None
        self._join()
        _undisposed.add(self._comm)

    @property
    def label(self) -> str:
        """Return ``nccl by nccl4py``, where that binds NCCL on all ranks."""
        return f"{self.name} by {Nccl4py.name}" if self._has_nccl4py else self.name

    @classmethod
    def probe(cls, group: Group) -> str:
        try:
            available = bool(find_binding().available)
        except ImportError as error:
            return f"CuPy cannot be imported ({error})"
        return "" if available else "CuPy finds no libnccl.so.2; pip install '.[cuda12]' in the checkout, or cuda13"

    @staticmethod
    def network_refusal(adapters: Path = Path("/sys/class/infiniband")) -> str:
        """Return why NCCL would use sockets between nodes, having no adapter for RDMA and no plugin; or an empty text."""
        if os.environ.get("NCCL_IB_DISABLE", "0") == "0" and adapters.is_dir() and any(adapters.iterdir()):
            return ""
        wanted = os.environ.get("NCCL_NET_PLUGIN", "")
        name = wanted if ".so" in wanted else f"libnccl-net-{wanted}.so" if wanted else "libnccl-net.so"
        try:
            ctypes.CDLL(name)  # as NCCL would
        except OSError:
            return f"there is no adapter for RDMA, and no plugin {name}"
        return ""

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return memory of the device, in a window of NCCL if all ranks get one; then all ranks raise what one lacks.

        What was returned before is freed then, if no rank has an array on it any more.
        """
        if not self.has_windows:
            return super().allocate(nbytes)
        self.close()
        taken: list[DeviceArray] = []
        gather_or_raise(self.group, lambda: taken.append(self.device.allocate(nbytes, self._allocator)))
        are_everywhere = False
        try:
            are_everywhere = all(gather_or_raise(self.group, lambda: self._register(taken[0])))
        finally:
            if not are_everywhere:  # NCCL would choose kernels for windows on some ranks only
                self._end_windows([address(taken[0])])
        return taken[0]

    def refusal(self, dtype: np.dtype[Any], op: ReduceOp) -> str:
        return nccl_refusal(dtype, op)

    def all_reduce(self, buffer: DeviceArray, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind ncclAllReduce, in place."""
        return self._between(buffer, buffer, self.all_reduce_calls(buffer.size, buffer.dtype, op))

    def all_reduce_arrays(self, arrays: FlatArrays, fold: Fold) -> Steps:
        """Combine arrays of the caller, after what its stream was given so far: ncclAllReduce of each, together."""
        yield from self._operation(self._all_reduce_calls(arrays.sources, arrays.targets, fold.op), []).run()
        for target in arrays.targets:
            self._divide(address(target), target.size, fold)

    def capture(self, sources: Sequence[DeviceArray], targets: Sequence[DeviceArray], fold: Fold) -> None:
        """Make the same a part of the CUDA graph that the caller's stream captures; nothing watches over it when it runs."""
        self._check()
        self._is_captured = True
        self._issue(self._all_reduce_calls(sources, targets, fold.op), self.device.current_stream())
        for target in targets:
            self._divide(address(target), target.size, fold)

    def all_reduce_in_order(self, buffer: DeviceArray, op: ReduceOp) -> Operation:
        """Bind: fold the buffers of all ranks in the order of the ranks; every rank gets the same bits.

        As `pairwise.ordered_all_reduce` on the host: each rank gets its part of the buffers of all others, one kernel adds
        them, and all gather the sums.
        """
        device, rank, size = self.device, self.group.rank, self.group.size
        bounds = part_bounds(buffer.size, size)
        parts, gather = [buffer[start:stop] for start, stop in pairwise(bounds)], self.all_gather(buffer, bounds)
        own = parts[rank]
        stride = -(-own.nbytes // PACKET_BYTES) * PACKET_BYTES
        received = device.allocate(max((size - 1) * stride, 1))
        # the addends of all ranks, in their order: this rank's own one lies in the buffer
        places = [(peer - rank - 1) % size * stride for peer in range(size)]
        addends = [own if peer == rank else received[at:][: own.nbytes].view(own.dtype) for peer, at in enumerate(places)]
        kernel, table = fold_kernel(buffer.dtype, op), device.allocate(8 * size)
        device.prepare(kernel)
        device.put(table, np.array(list(map(address, addends)), np.uint64).view(np.uint8))
        arguments = address(table), np.int32(size), 0, address(own), own.size, np.int32(0)  # from rank 0 on

        def run() -> Steps:
            yield from self.exchange(parts, addends)
            if own.size:
                device.current_stream().launch(kernel, num_blocks(own.size, own.dtype.itemsize), arguments)
            yield from gather.run()

        return Operation(run, gather.parts, received.nbytes + table.nbytes)

    def reduce_scatter(self, buffer: DeviceArray, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind ncclReduceScatter in place, or one ncclReduce per part where parts differ."""
        start, stop = bounds[self.group.rank : self.group.rank + 2]
        return self._between(buffer, buffer[start:stop], self.scatter_calls(bounds, buffer.dtype, op), start)

    def all_gather(self, buffer: DeviceArray, bounds: Sequence[int]) -> Operation:
        """Bind ncclAllGather in place, or one ncclBroadcast per part where parts differ."""
        start, stop = bounds[self.group.rank : self.group.rank + 2]
        return self._between(buffer[start:stop], buffer, self.gather_calls(bounds, buffer.dtype.itemsize))

    def broadcast(self, buffer: DeviceArray, root: int = 0) -> Operation:
        """Bind ncclBroadcast, in place."""
        return self._between(buffer, buffer, self.broadcast_calls(buffer.nbytes, root))

    def bind(self, calls: Sequence[_Call], count: int = 0, fold: Fold | None = None) -> Enqueue:
        """Return what enqueues calls on memory of the caller, and divides a mean of so many elements by a prepared kernel."""

        def enqueue(source: int, target: int) -> None:
            if self._failure:
                self.raise_failure()
            self._enqueue(_placed(calls, source, target), self.device.current_stream())
            if fold is not None:
                self._divide(target, count, fold)

        return enqueue

    def exchange(self, sends: Sequence[DeviceArray], receives: Sequence[DeviceArray]) -> Steps:
        """Send an array of the caller to each peer, and receive one from each, all together. A collective call."""
        kind, rank, size = self._nccl.NCCL_UINT8, self.group.rank, self.group.size
        calls: list[_Call] = []
        for distance in range(1, size):  # each rank begins with the next one, so that not all send to one rank at first
            for verb, peer, arrays in (("send", rank + distance, sends), ("recv", rank - distance, receives)):
                if (array := arrays[peer % size]).nbytes:
                    calls.append((verb, address(array), array.nbytes, kind, peer % size))
        pairs = {(verb, peer) for verb, *_, peer in calls}
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
        """Give the communicator up, with whatever is under way; every later use raises `reason`. The peers must do likewise.

        That is done on a thread of its own: NCCL may wait there for peers that have stopped, and the caller is to raise.
        """
        with self._lock:
            if not self._failure:
                self._failure = reason
                self._start(self._comm.abort)[0].join(ABORT_SECONDS)

    def close(self) -> None:
        """Free the memory of windows that no rank has an array on; after a failure something may use it, and nothing is freed.

        All ranks end the same windows: each rank chooses the address of the next one by its own list of open windows.
        """
        if not self.has_windows:
            return
        made = list(self._windows)
        mine = None if self._failure else {index for index, start in enumerate(made) if start in self._left}
        all_ranks = self.group.comm.allgather(mine)
        if None not in all_ranks:
            self._end_windows([made[index] for index in sorted(set.intersection(*all_ranks))])

    def dispose(self) -> None:
        """Destroy the communicator, here and now: CuPy would do it when its object is collected, on whichever thread.

        NCCL waits until graphs that contain its calls are gone; the program may keep some, and is not to wait for itself.
        """
        if self._watcher is not None:
            self._watcher.stop()
        if not self._failure:
            self._end_windows(list(self._windows))  # arrays may go on to use their memory
            self._failure = "it was closed"
            if not self._is_captured:
                self._comm.destroy()
            else:
                thread, _ = self._start(self._comm.destroy)
                thread.join(DESTROY_SECONDS)
                if thread.is_alive():
                    logger.warning(
                        f"{self.group.name}: NCCL's communicator keeps its memory until the CUDA graphs that contain its "
                        "collectives are deleted, on all ranks: delete them before its owner is closed"
                    )
        _undisposed.discard(self._comm)
        self._comm = None

    def _divide(self, start: int, count: int, fold: Fold) -> None:
        """Divide a mean, if it is one; its kernel was prepared when the plan was bound."""
        if fold.divisor > 1 and count:
            real = real_dtype(fold.dtype)
            count *= fold.dtype.itemsize // real.itemsize
            arguments = start, count, accumulation_dtype(ReduceOp.SUM, real).type(fold.divisor)
            self.device.current_stream().launch(divide_kernel(real), num_blocks(count, real.itemsize), arguments)

    def _native(self, dtype: np.dtype[Any], op: ReduceOp) -> tuple[int, int, int]:
        native = native_type(dtype, op)
        if native is None:
            raise TransportError(f"{self.group.name}: {self.refusal(dtype, op)}; the transport cuda_ipc can")
        return getattr(self._nccl, f"NCCL_{native[0]}"), native[1], getattr(self._nccl, f"NCCL_{native[2]}")

    def _all_reduce_calls(self, sources: Sequence[DeviceArray], targets: Sequence[DeviceArray], op: ReduceOp) -> list[_Call]:
        calls: list[_Call] = []
        for source, target in zip(sources, targets, strict=True):
            calls += _placed(self.all_reduce_calls(source.size, source.dtype, op), address(source), address(target))
        return calls

    def all_reduce_calls(self, count: int, dtype: np.dtype[Any], op: ReduceOp) -> list[_Call]:
        """Return what combines elements, for `bind`."""
        kind, width, native = self._native(dtype, op)
        return [("allReduce", 0, 0, count * width, kind, native)]

    def scatter_calls(self, bounds: Sequence[int], dtype: np.dtype[Any], op: ReduceOp) -> list[_Call]:
        """Return what combines sources, and writes this rank's part to a target: that of the part in the source, or apart."""
        kind, width, native = self._native(dtype, op)
        if _are_equal(bounds):
            return [("reduceScatter", 0, 0, bounds[1] * width, kind, native)]
        ranges = [(start * dtype.itemsize, (stop - start) * width) for start, stop in pairwise(bounds)]
        return [("reduce", start, 0, count, kind, native, root) for root, (start, count) in enumerate(ranges)]

    def gather_calls(self, bounds: Sequence[int], itemsize: int = 1) -> list[_Call]:
        """Return what sends the part of each rank to all: it may lie where it is to be in the target, or apart."""
        kind = self._nccl.NCCL_UINT8
        if _are_equal(bounds):
            return [("allGather", 0, 0, bounds[1] * itemsize, kind)]
        ranges = [(start * itemsize, (stop - start) * itemsize) for start, stop in pairwise(bounds)]
        return [("broadcast", 0, start, nbytes, kind, root) for root, (start, nbytes) in enumerate(ranges)]

    def broadcast_calls(self, nbytes: int, root: int) -> list[_Call]:
        """Return what sends bytes of the root to all, itself included."""
        return [("broadcast", 0, 0, nbytes, self._nccl.NCCL_UINT8, root)]

    def _between(self, source: DeviceArray, target: DeviceArray, calls: Sequence[_Call], first: int = 0) -> Operation:
        """Return what makes calls on these arrays; the target is from element `first` on."""
        part = Part(first, first + target.size, (target,))
        return self._operation(_placed(calls, address(source), address(target)), [part])

    def _operation(self, calls: Sequence[_Call], parts: list[Part], connects: bool = False) -> Operation:
        """Return what makes calls, after what the caller's stream was given so far; some may connect ranks first."""

        def run() -> Steps:
            self._check(asks_peers=self._watcher is None)
            current, polls = self.device.current_stream(), 0
            try:
                if connects:
                    yield from self._enqueue_apart(calls, current)
                else:
                    self._enqueue(calls, current)
                if self._watcher is not None and not self._watcher.watched.must_wait():
                    return
                assert self._ended is not None, "was recorded"
                while not self._ended.done():
                    polls += 1
                    if polls % POLLS_PER_CHECK == 0:
                        self._check()
                    yield WAITING
                self.raise_failure()
            except GeneratorExit:
                self.abort("it was given up while ranks were waiting for each other")
                raise

        return Operation(run, parts)

    def _enqueue(self, calls: Sequence[_Call], current: Stream) -> None:
        """Make calls after what a stream was given so far; it waits for them, and so does the watcher, if there is one."""
        self._follow(current)
        watcher = self._watcher
        limit = None if watcher is None else watcher.begin_limit(self._stream)
        self._issue(calls)
        self.device.last_call = self._ended = ended = self._stream.record(self._ended)
        current.wait(ended)
        if watcher is not None:
            watcher.add(ended, limit)

    def _follow(self, current: Stream) -> None:
        """Let what comes wait for what a stream was given so far, and for what NCCL was given on this GPU."""
        self._given = current.record(self._given)
        self._stream.wait(self._given)
        if self.device.last_call not in (None, self._ended):  # of another communicator, say
            self._stream.wait(self.device.last_call)

    def _issue(self, calls: Sequence[_Call], on: Stream | None = None) -> None:
        """Make calls, several of them as a group, on the stream of the transport or another one."""
        if self._failure:  # the watcher may have aborted while this thread waited for room on a stream
            self.raise_failure()
        stream = (on or self._stream).pointer
        if len(calls) > 1:
            self._nccl.groupStart()
        try:
            for verb, *arguments in calls:
                getattr(self._comm, verb)(*arguments, stream)
        finally:
            if len(calls) > 1:
                self._nccl.groupEnd()

    def _enqueue_apart(self, calls: Sequence[_Call], current: Stream) -> Steps:
        """Do the same on a thread of its own: NCCL connects ranks there."""
        thread, failures = self._start(lambda: self._enqueue(calls, current))
        while thread.is_alive():
            yield WAITING
        if failures:
            self.abort(failures[0])
            self._check()

    def _start(self, act: Callable[[], None]) -> tuple[threading.Thread, list[str]]:
        """Start a thread, and return where it tells what it raises: NCCL waits for peers on the host, which nothing ends."""
        failures: list[str] = []

        def run() -> None:
            try:
                with self.device.activate():  # a new thread computes on GPU 0
                    act()
            except BaseException as error:
                failures.append(f"{error}" or type(error).__name__)

        thread = threading.Thread(target=run, name=f"nccl {self.group.name}", daemon=True)
        thread.start()
        return thread, failures

    def _check(self, asks_peers: bool = True) -> None:
        """Raise what NCCL has found out by itself, such as a broken link to a peer, or that a peer has aborted.

        To ask for that takes MPI some microseconds: an operation leaves it to the watcher.
        """
        with self._lock:
            if not self._failure:
                try:
                    self._comm.check_async_error()
                except Exception as error:  # CuPy raises KeyError for results that it has no name for
                    self.abort(f"{error}")
            if asks_peers and not self._failure and self._watcher is not None and self._watcher.watched.peer_has_aborted():
                self._told_at = time.monotonic()
                self.abort("another rank has given up")
        self.raise_failure()

    def _give_up(self, seconds: float) -> None:
        """Abort what is under way, and has been for longer than its deadline, and raise."""
        with self._lock:
            if not self._failure:
                self._is_overdue = True
                self.abort(
                    f"rank {self.group.ranks[self.group.rank]}, {self.group.name}: what NCCL was given has not ended within "
                    f"{round(seconds, 2):g} s on the GPU, although all ranks came to the call: one has stopped after that, or "
                    "a GPU, or a link between GPUs, gets no further"
                )
        self.raise_failure()

    def _join(self) -> None:
        """Make the communicator, on a thread of its own."""
        values, identifier = self._prepare(), self._identifier()

        def join() -> None:
            self._comm = self._nccl.NcclCommunicator(self.group.size, identifier, self.group.rank)
            try:
                self.raise_failure()  # it may have been given up meanwhile: its kernels would wait on the GPU
                if self._tries_windows:
                    with suppress(Exception):  # an old NCCL has no windows, and one that has may have none here
                        self._register(values)
                self._try_verbs(values)
            except Exception:
                self._comm.abort()  # its kernels would wait for peers for ever
                raise

        with connecting_first():
            thread, failures = self._start(join)
            thread.join(JOIN_SECONDS)
        problem = "".join(failures)
        if thread.is_alive():
            problem = self._failure = f"not all ranks had joined after {JOIN_SECONDS:g} s"
        problems, windows = zip(*self.group.comm.allgather((problem, bool(self._windows))), strict=True)
        failed = [rank for rank, text in zip(self.group.ranks, problems, strict=True) if text]
        if failed:
            text = next(filter(None, problems))
            if not problem:
                self.abort(text)
            self._windows.clear()
            raise TransportError(f"{self.group.name}: NCCL could not join {ranks_text(failed)}: {text}; see NCCL_DEBUG=WARN")
        self.has_windows = all(windows)
        self._end_windows(list(self._windows))

    def _register(self, memory: DeviceArray) -> bool:
        """Register memory of NCCL in a window, and return whether there can be one. A collective call."""
        if window := self._comm.register(address(memory), memory.nbytes):
            self._windows[address(memory)] = window
        return bool(window)

    def _end_windows(self, starts: Sequence[int]) -> None:
        """End windows, if there are any at these addresses, and free what no array is on, when the GPU uses it no more."""
        if starts := [start for start in starts if start in self._windows]:
            self.device.synchronize()  # without the lock: the watcher needs it to abort what does not end
        with self._lock:
            for start in starts:
                self._comm.deregister(self._windows.pop(start))
                if start in self._left:
                    self._left.remove(start)
                    self._nccl.allocator.free(start)

    def _leave(self, start: int) -> None:
        """Free memory of NCCL that the last array has left, on whichever thread, or keep it as long as it is in a window."""
        with self._lock:
            if start in self._windows:
                self._left.add(start)
                return
        self.device.synchronize()  # as CUDA does when it frees memory of its own
        self._nccl.allocator.free(start)

    def _prepare(self) -> DeviceArray:
        """Make the stream, and return memory for the first calls: what one rank lacks, all must raise before they wait."""
        taken: list[DeviceArray] = []

        def take() -> tuple[int, bool, list[str | None]]:
            if os.environ.get("NCCL_COMM_BLOCKING") == "0":
                raise TransportError("NCCL_COMM_BLOCKING=0 is set: calls would return before the GPU has them; unset it")
            self._stream, nbytes = self.device.stream(), max([8 * self.group.size, *TRIAL_BYTES])
            taken.append(self.device.allocate(nbytes, self._allocator).view(np.int64))
            return int(self._nccl.get_version()), self._allocator is not None, [os.environ.get(name) for name in _OF_WINDOWS]

        versions, allocators, switches = zip(*gather_or_raise(self.group, take), strict=True)
        self._has_nccl4py = all(allocators)
        self._tries_windows = self._has_nccl4py and all(switches[0] == others for others in switches)
        if len(set(versions)) > 1:
            ranks = ranks_by(zip(self.group.ranks, versions, strict=True))
            listed = ", ".join(f"{version_text(version)} on {ranks_text(members)}" for version, members in ranks.items())
            raise TransportError(f"{self.group.name}: NCCL {listed}; install one version on all ranks")
        return taken[0]

    def _try_verbs(self, values: DeviceArray) -> None:
        """Make the first call of each verb, and check the results; raises TransportError if one is wrong."""
        # integers: the cube of the number of ranks need not be a float32
        size, kind, total = self.group.size, self._nccl.NCCL_INT64, self._nccl.NCCL_SUM
        self.device.put(values, np.ones(values.size, np.int64))
        self._follow(self.device.current_stream())
        start = address(values)
        own = start + values.itemsize * self.group.rank
        self._issue([("allReduce", start, start, size, kind, total)])
        self._issue([("reduce", start, start, size, kind, total, 0)])
        self._issue([("broadcast", start, start, size, kind, 0)])
        self._issue([("reduceScatter", start, own, 1, kind, total)])
        self._issue([("allGather", own, start, 1, kind)])
        expected, behind = np.ones(values.size, np.int64), start + size * values.itemsize
        expected[:size] = size**3
        for nbytes in TRIAL_BYTES:
            count = nbytes // values.itemsize - size
            self._issue([("allReduce", behind, behind, count, kind, total)])
            expected[size : size + count] *= size
        event, ends = self._stream.record(), time.monotonic() + JOIN_SECONDS
        while not event.done():
            self.raise_failure()
            if time.monotonic() > ends:
                raise TransportError(f"its first sums had not ended after {JOIN_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        found = self.device.get(values)
        if not np.array_equal(found, expected):
            wrong = int(np.argmax(found != expected))
            raise TransportError(f"its first sums were wrong: {found[wrong]} in the place of {expected[wrong]}")

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


_Call = tuple[Any, ...]
"""The name of a method of the communicator, and its arguments but for the stream."""
Enqueue = Callable[[int, int], None]
"""Gives NCCL its work on memory from one address on, the result of which goes to another one."""


def _placed(calls: Sequence[_Call], source: int, target: int) -> list[_Call]:
    """Return calls of which the first two arguments are addresses in a source and a target, counted from their beginning."""
    return [(verb, source + first, target + second, *more) for verb, first, second, *more in calls]


def _are_equal(bounds: Sequence[int]) -> bool:
    return bounds[0] == 0 and len({stop - start for start, stop in pairwise(bounds)}) == 1
