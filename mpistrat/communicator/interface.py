"""BaseCommunicator: the interface that strategies and variables communicate through, with one replica or several."""

from __future__ import annotations

import operator
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from mpistrat.arrays import Array, copy_overlapping, like
from mpistrat.communicator.explain import Explanation, MemoryReport
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.validate import alike, check_gather, checked_index, read_arrays
from mpistrat.execution.engine import Work
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.timeline import Timeline
from mpistrat.topology.world import World

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")
Arrays = TypeVar("Arrays", bound="Array | list[Array]")
"""An array, or a list of arrays; a verb returns the same kind as it is given."""


def as_lists(arrays: Any, out: Any) -> tuple[Any, Any, bool]:
    """Return an array, and `out` if there is one, as lists of one, or lists as they are; and whether it is one."""
    is_one = not isinstance(arrays, (list, tuple))
    return ([arrays], None if out is None else [out], True) if is_one else (arrays, out, False)


class BaseCommunicator(ABC):
    """The collectives; `mpistrat.Communicator` documents each of them.

    Attributes
    ----------
    world : World
        The placement of the ranks on nodes.
    rank, size : int
        This replica, and the number of replicas.
    timeline : Timeline
        Records the phases of each collective while it is enabled.
    is_strict : bool
        Whether every call is compared before it returns, including what `note` and `confirm` would compare later.
    is_closed : bool
        Whether `close` was called: then every verb raises RuntimeError.
    """

    world: World
    rank: int
    size: int
    timeline: Timeline
    is_strict: bool = False
    is_closed: bool = False
    _closed_with = ""
    _movement: Any  # the verbs that only move arrays, of one array each: `DataMovement`, or copies
    _reduce_scatter: Callable[..., Array]  # of one array: operation, array, axis, options, out
    # makes a call of a verb like an earlier one, if it can: verb, its axis or root, operation, array, options, out
    _known: Callable[..., Any] | None = None
    _active: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)  # makes this rank's GPU current

    @property
    def node(self) -> int:
        """The index of this rank's node, counting virtual nodes."""
        return self.world.place(self.rank).node.index

    @property
    def local_rank(self) -> int:
        """The position of this rank on its node, from 0."""
        return self.world.place(self.rank).local_rank

    @property
    def path(self) -> str:
        """The transports used for arrays on GPUs, and why not faster ones; empty where replicas compute on CPUs."""
        return ""

    @property
    @abstractmethod
    def num_collectives(self) -> int:
        """Collective calls made so far: the sequence number of the last one."""

    @abstractmethod
    def all_reduce(
        self, op: ReduceOp | str, arrays: Arrays, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Arrays:
        """Combine each array across replicas. A collective call."""

    def try_fast_all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        noted: int = 0,
        frames: int = 2,
    ) -> list[Array] | None:
        """All-reduce arrays like those of an earlier call, which are not checked again; else do nothing and return None.

        A collective call. `noted` is the digest of a text that would otherwise be passed to `note` first; at least so many
        `frames` of this library lie between this call and the program.
        """
        return None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Let `all_reduce` be a part of CUDA graphs that are captured in this block: see `mpistrat.Communicator.capture`."""
        yield

    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
        structure: object = None,
    ) -> Work[Arrays]:
        """Start an asynchronous all-reduce and return its handle. A collective call."""
        return Work.ended(self.all_reduce(op, arrays, options, out))

    def reduce_scatter(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
    ) -> Arrays:
        """Combine each array across ranks; each rank gets its part along `axis`. A collective call.

        Parts are in rank order and sized as by `numpy.array_split`: if they are not equal, the first ones are longer by one.

        Parameters
        ----------
        op, arrays, options : ReduceOp or str, ndarray or list of ndarray, CommunicationOptions
            As for `all_reduce`, but arrays have at least one axis, and those of a list are reduced one after the other.
        axis : int
            The axis to split.
        out : ndarray or list of ndarray, optional
            C-contiguous arrays of the shapes and dtypes of the parts.
        """
        scatter = lambda array, target: self._reduce_scatter(op, array, axis, options, target)  # noqa: E731
        return self._each("reduce_scatter", scatter, arrays, out, options, number=axis, op=op)

    def start_reduce_scatter(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
    ) -> Work[Arrays]:
        """Start a `reduce_scatter`; ``wait()`` of the returned handle returns its result. A collective call.

        On a GPU where NCCL joins all ranks it is enqueued, as by `start_all_reduce`. Elsewhere it has ended when this returns.
        """
        call = partial(self.reduce_scatter, op, axis=axis, options=options)
        return self._start("start_reduce_scatter", call, arrays, out, options)

    def all_gather(
        self, arrays: Arrays, axis: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Arrays:
        """Concatenate the arrays of all ranks along `axis`, in rank order. A collective call.

        Parameters
        ----------
        arrays : ndarray or list of ndarray
            Sizes along `axis` may differ between ranks; all others, and the dtype, must agree. The arrays of a list are
            gathered one after the other.
        axis, options : int, CommunicationOptions
            The axis to concatenate along; options that override those of the communicator.
        out : ndarray or list of ndarray, optional
            C-contiguous arrays of the shapes and dtypes of the results, on all ranks or on none.

        Raises
        ------
        InvalidArgumentError
            On every rank, if an array has no axes, `axis` is out of range, or shapes, dtypes or `out` do not match.
        """
        gather = lambda array, target: self._movement.all_gather(array, axis, options, target)  # noqa: E731
        return self._each("all_gather", gather, arrays, out, options, number=axis)

    def start_all_gather(
        self, arrays: Arrays, axis: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Work[Arrays]:
        """Start an `all_gather`, as `start_reduce_scatter` does its verb. A collective call."""
        return self._start("start_all_gather", partial(self.all_gather, axis=axis, options=options), arrays, out, options)

    def gather(self, arrays: Array | list[Array], root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the arrays of all ranks, in rank order, on rank `root`; None elsewhere. A collective call.

        Parameters
        ----------
        arrays : ndarray or list of ndarray
            The same shape and dtype on all ranks. For a list, a list of the results is returned.
        root, options : int, CommunicationOptions
            The rank that receives them; options that override those of the communicator.
        """

        def of_ranks(results: Sequence[Any], values: Sequence[Any], _: object) -> list[Any]:
            return [each and [like(one, value) for one in each] for each, value in zip(results, values, strict=True)]

        gather = lambda array, _: self._movement.gather(array, root, options)  # noqa: E731
        return self._each("gather", gather, arrays, None, options, of_ranks)

    def all_to_all(self, arrays: Arrays, options: CommunicationOptions | None = None) -> Arrays:
        """Send array i to rank i; return the arrays received, in rank order. A collective call.

        Parameters
        ----------
        arrays : list of ndarray or ndarray
            One for each rank, of one dtype and equal sizes on all axes but the first. Or one array, which is split along the
            first axis as by `reduce_scatter`: rank i gets part i, and the parts received are concatenated along that axis.

        Raises
        ------
        InvalidArgumentError
            If there is not one array for each rank, or shapes or dtypes do not match.
        """
        given, _, is_one = as_lists(arrays, None)
        sources, _ = self._read("all_to_all", given, None, options)
        if is_one:
            with self.refusing("all_to_all", options):
                check_gather(sources[0], 0, "all_to_all")
            sources = np.array_split(sources[0], self.size)
        with self._active():
            received = self._movement.all_to_all(sources, options, joins=is_one)
            if is_one:
                received = [received[0] if len(received) == 1 else np.concatenate(received)]
            found: Any = alike(received, given, None)
        result: Arrays = found[0] if is_one else found
        return result

    def broadcast(
        self, arrays: Arrays, root: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Arrays:
        """Return the array of rank `root`, with its shape and dtype. A collective call.

        Parameters
        ----------
        arrays : ndarray or list of ndarray
            On `root` the array to send; on another rank it only tells whether the result goes to the GPU. The arrays of a list
            are sent one after the other.
        root, options : int, CommunicationOptions
            The rank that sends; options that override those of the communicator.
        out : ndarray or list of ndarray, optional
            C-contiguous arrays of the shape and dtype of the root's array; they may be `arrays` themselves.

        Raises
        ------
        InvalidArgumentError
            On every rank, if `root` is not a rank, or `out` of one rank has another shape or dtype.
        """
        send = lambda array, target: self._movement.broadcast(array, root, options, target)  # noqa: E731
        return self._each("broadcast", send, arrays, out, options, number=root)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a new array of undefined values: on the GPU, or in host memory if replicas compute there. A collective call.

        Where nccl4py joins all ranks the array is in memory of NCCL, in a symmetric window: kernels of NCCL read and write it
        without a copy, and switches of NVLink can add what lies there. That takes whole blocks of 2 MiB, so make few large
        arrays, and views of them. Other libraries may be unable to send it, such as MPI. An array is freed as all others, by a
        later call of `empty` or `close` on all ranks.

        Parameters
        ----------
        shape, dtype : int or tuple of int, dtype
            The same on all ranks.

        Raises
        ------
        TransportError
            On every rank, if one has no memory for it.
        """
        self._require_open()
        with self.refusing("empty"):
            extents = tuple(map(operator.index, shape if isinstance(shape, (tuple, list)) else [shape]))
            wanted = np.dtype(dtype)
        with self._active():
            made: Array = self._movement.empty(extents, wanted)
        return made

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all ranks have entered the barrier. A collective call."""
        self._require_open()
        self._movement.barrier(options)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the object of rank `root`, on every rank. A collective call, and a slow one: what is sent is pickled.

        Parameters
        ----------
        value : object
            That of `root` is sent; those of other ranks do not matter.
        root : int
            Whose object it is.

        Raises
        ------
        Exception
            What pickling raises, on `root`; AgreementError on the others then.
        InvalidArgumentError
            If `root` is not a rank.
        """
        self.note("broadcast_object")
        is_root = self.rank == root
        found = self.broadcast(self._pickled("broadcast_object", value if is_root else None), root)
        return value if is_root else pickle.loads(found.data)

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks, in rank order, on rank `root`; None elsewhere. A collective call, and a slow one.

        Parameters
        ----------
        value : object
            Is pickled, and may be of another size and type on each rank.
        root : int
            Who gets them.

        Raises
        ------
        Exception
            What pickling raises, on the rank that cannot; AgreementError on the others then.
        InvalidArgumentError
            If `root` is not a rank.
        """
        with self.refusing("gather_objects"):
            checked_index(root, "root", self.size)
        self.note(f"gather_objects(root={root})")
        mine, nothing = self._pickled("gather_objects", value), np.empty(0, np.uint8)
        arrived = self.all_to_all([mine if rank == root else nothing for rank in range(self.size)])
        return [pickle.loads(each.data) for each in arrived] if self.rank == root else None

    def _pickled(self, verb: str, value: Any) -> Array:
        with self.refusing(verb):
            return np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)

    def agree(self, call: str, error: Exception | None = None, options: CommunicationOptions | None = None) -> None:
        """Check at once that all replicas pass the same text. A collective call.

        Its deadline is that of `options`, the options of the call that replicas agree on; they need not be valid.

        Raises
        ------
        AgreementError
            On every replica, if the texts differ; a replica that passes an `error` raises that error.
        """
        self._require_open()
        if error is not None:
            raise error

    def note(self, text: str, options: CommunicationOptions | None = None) -> None:  # noqa: B027 - one replica agrees with itself
        """Compare a text along with the next collective, which raises AgreementError if replicas have noted different texts.

        With MPISTRAT_STRICT the text is compared at once, as by `agree`: a collective call with the deadline of `options`.
        """

    def confirm(self) -> None:  # noqa: B027 - as for `note`
        """Compare the calls that were not compared when they were made: those in which MPI reduced arrays between nodes.

        A collective call if there are any. It happens automatically every 128 small calls, more often after large ones, in
        `close` and at the end of the program; with MPISTRAT_STRICT after each call.

        Raises
        ------
        AgreementError
            On every replica, if the calls differ.
        """

    def refuse(self, call: str, error: Exception, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise `error` on a replica that cannot make a call, and AgreementError on the replicas that make it.

        With MPISTRAT_STRICT this is a collective call in which all raise together, with the deadline of `options`.
        """
        raise error

    def refusing(self, call: str, options: CommunicationOptions | None = None) -> AbstractContextManager[None]:
        """Return a context that refuses a call, as by `refuse`, if what is in it raises."""
        return _Refusing(self, call, options)

    def agree_on(self, call: str, make: Callable[[], tuple[T, str]], options: CommunicationOptions | None = None) -> T:
        """Return the first of what `make` returns, after comparing the second, a text, on all replicas. A collective call.

        If `make` raises on one replica, the others raise an AgreementError that tells it.
        """
        try:
            made, text = make()
        except Exception as error:
            self.agree(call, error, options)
            raise
        self.agree(f"{call}({text})", None, options)
        return made

    def explain(self, arrays: Array | Sequence[Array], options: CommunicationOptions | None = None) -> Explanation:
        """Return how a sum or mean of such arrays is computed. Sends nothing."""
        self._require_open()
        check_options(options)
        for index, array in enumerate(read_arrays(as_lists(arrays, None)[0])[0]):
            check_dtype(ReduceOp.SUM, array.dtype, f"array {index}")
        return Explanation(self.world)

    def memory_report(self) -> MemoryReport:
        """Return the memory this rank holds for communication."""
        self._require_open()
        return MemoryReport(self.rank)

    def close(self, owner: str = "") -> None:
        """Free what the communicator holds; closing again does nothing. A collective call.

        Parameters
        ----------
        owner : str
            The strategy that is closed, for the error of later calls; by default it is the communicator.
        """
        self.is_closed, self._closed_with = True, owner

    def _read(
        self, verb: str, values: Sequence[Any], out: Any, options: CommunicationOptions | None
    ) -> tuple[list[Array], list[Array] | None]:
        """Return values and `out` as arrays; raise on all replicas if one of them cannot be used."""
        self._require_open()
        try:
            return read_arrays(values, out)
        except Exception as error:  # not `refusing`, which takes four calls of Python more
            self.refuse(verb, error, options)

    def _each(
        self,
        verb: str,
        act: Callable[[Array, Array | None], Any],
        arrays: Arrays,
        out: Any = None,
        options: CommunicationOptions | None = None,
        alike: Callable[[Sequence[Any], Sequence[Any], Sequence[Any] | None], list[Any]] = alike,
        number: object = None,
        op: object = None,
    ) -> Arrays:
        """Apply a verb to one array, or to each array of a list, which must be equally long on all replicas.

        With the `number` of an axis or a root, and maybe an operation, it may be like an earlier call.
        """
        if self._known is not None and number is not None:
            known: Arrays | None = self._known(verb, number, op, arrays, options, out)
            if known is not None:
                return known
        given, wanted, is_one = as_lists(arrays, out)
        sources, targets = self._read(verb, given, wanted, options)
        if not is_one:
            self.note(f"{verb} of {len(sources)} arrays", options)
        with self._active():
            if len(sources) == 1:
                found = [act(sources[0], None if targets is None else targets[0])]
            elif targets is None:
                found = [act(source, None) for source in sources]
            else:
                found = list(map(act, copy_overlapping(sources, targets), targets))
            results: Any = alike(found, given, wanted)
        answer: Arrays = results[0] if is_one else results
        return answer

    def _start(
        self, verb: str, call: Callable[..., Arrays], arrays: Arrays, out: Arrays | None, options: CommunicationOptions | None
    ) -> Work[Arrays]:
        """Start a call of a verb."""
        return Work.ended(call(arrays, out=out))

    def _require_open(self) -> None:
        if self.is_closed:
            kind, line = ("strategy", "strategy.run(step)") if self._closed_with else ("communicator", "comm.barrier()")
            name = "strategy" if self._closed_with else "comm"
            raise RuntimeError(
                f"this {kind} was closed: {self._closed_with or repr(self)} cannot communicate any more.\n"
                f"    incorrect:  {name}.close(); {line}\n"
                f"    correct:    {line}; {name}.close(), once, after the last call"
            )

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # closing is collective, and a rank that raised cannot know whether the others did
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}({self.size}), world={self.world.shape})"


class _Refusing:
    """A context that refuses a call if what is in it raises, which reading a value of the program may; see `refusing`.

    A generator would take a microsecond.
    """

    def __init__(self, communicator: BaseCommunicator, call: str, options: CommunicationOptions | None) -> None:
        self._communicator, self._call, self._options = communicator, call, options

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self._communicator.refuse(self._call, error, self._options)
