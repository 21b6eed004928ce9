"""Communicator: collectives on arrays over all ranks of an MPI communicator.

The first call with given shapes and dtypes chooses the plans, lays out the buckets and binds the memory. Later calls with the
same shapes and dtypes reuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpistrat import settings
from mpistrat.algorithms.choose import Choice
from mpistrat.algorithms.cost import DEFAULT, CostModel
from mpistrat.arrays import Array
from mpistrat.communicator.call_sequence import CallSequence
from mpistrat.communicator.construction import build_hierarchy
from mpistrat.communicator.data_movement import DataMovement
from mpistrat.communicator.explain import Explanation
from mpistrat.communicator.fast_paths import SIGNATURE, KnownBatch
from mpistrat.communicator.gpu_arrays import GpuArrays
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.interface import Arrays, BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, shared_defaults
from mpistrat.communicator.plan_cache import PlanCache
from mpistrat.communicator.reductions import Reductions
from mpistrat.communicator.small_batch import OneArray, SmallBatch
from mpistrat.communicator.validate import check_array, check_num_packs, for_each
from mpistrat.device.binding import bound_device
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.execution.executor import Executor
from mpistrat.execution.memory import MemoryReport
from mpistrat.execution.work import Work
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.logger import logger
from mpistrat.reduction import ReduceOp
from mpistrat.tuning.file import shared_model
from mpistrat.watch.recorder import recorder

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Communicator", "by_algorithm"]


class Communicator(BaseCommunicator):
    """Hierarchical collectives on NumPy and CuPy arrays over all ranks of an MPI communicator.

    Making one is a collective call of these ranks. As a context manager it closes itself. Every verb takes an array or a list
    of arrays and returns the same; the options of a call override those of the communicator. All messages are sent on
    duplicates of `comm`, so they never match messages of the program.

    Ranks compare their calls. If they make different calls, or pass different operations, shapes, dtypes or options that must
    agree, every verb raises AgreementError on all ranks before it returns a result, except for calls that `confirm` compares
    later. With a deadline (`timeout_seconds`), a verb raises DeadlineExceededError on every rank that has arrived and names
    those that have not; the communicator is unusable afterwards.

    Parameters
    ----------
    comm : MPI.Intracomm or Hierarchy
        COMM_WORLD, or a communicator of some of the job's ranks, as ``Split`` returns. Or a hierarchy of groups over them,
        which the communicator then owns.
    options : CommunicationOptions, optional
        Defaults for every call; the same on all ranks.
    num_packs : int, optional
        Split the elements of a batch into this many equal packs; 0 reduces each array by itself. None (the default) packs by
        the options' `bytes_per_pack`.
    model : CostModel, optional
        The cost model of algorithm ``auto``, the same on all ranks; by default the one that MPISTRAT_TUNING selects.
    uses_gpu : bool
        Whether arrays on this rank's GPU, if it has one, are combined there.

    Attributes
    ----------
    world : World
        The topology: which rank is on which node.
    rank, size, timeline : int, int, Timeline
        This rank; the number of ranks; a recorder of the phases of each collective, while it is enabled.

    Raises
    ------
    InvalidArgumentError
        If `comm` is not an intracommunicator of this rank, or `num_packs` is negative.
    AgreementError, DeadlineExceededError
        If ranks pass different arguments or have different settings, or do not all make this call before the deadline of
        `options`.
    LaunchError, TopologyError, TransportError
        If the ranks or their GPUs cannot form one job, or the settings name a transport that a node does not support.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | Hierarchy,
        options: CommunicationOptions | None = None,
        *,
        num_packs: int | None = None,
        model: CostModel | None = None,
        uses_gpu: bool = True,
    ) -> None:
        if isinstance(comm, Hierarchy):
            check_num_packs(num_packs)
        self.hierarchy = comm if isinstance(comm, Hierarchy) else build_hierarchy(comm, options, num_packs, model)
        self.world, self.rank, self.size = self.hierarchy.world, self.hierarchy.rank, self.hierarchy.world.size
        agreement = Agreement(self.hierarchy.world_group)
        self._options = shared_defaults(agreement).merge(options)
        self._executor = Executor(self.hierarchy)
        self.timeline = self._executor.timeline
        self._guard = CollectiveGuard(self.hierarchy, agreement, self._executor.intra.window, self._options, self)
        self._recorder, self._present = recorder(), self.hierarchy.call
        self._verbose = self.rank == 0 and settings.VERBOSE.read()
        self._say(f"{self.world}: {', '.join(f'{node.name} has ranks {node.ranks}' for node in self.world.nodes)}")
        plans = PlanCache(self._executor, self._say, shared_model(self.hierarchy, by_algorithm) if model is None else model)
        device = bound_device() if uses_gpu else None
        self._gpu = None if device is None else GpuArrays(device, self._executor, plans, self._guard, self._say)
        self._calls = CallSequence(self._guard, self._options)
        self._movement = DataMovement(self._executor, self._guard, self._calls, self._gpu)
        self._reductions = Reductions(self._executor, self._guard, self._calls, plans, self._gpu)
        self._reductions.num_packs = num_packs
        self._plans, self._fast = self._reductions.plans, self._reductions.fast
        # one small array in one all-reduce is the most common call: where ranks share cores, each line of Python counts
        self._fast_paths = self._fast.paths

    @property
    def num_collectives(self) -> int:
        """Collective calls made so far: the sequence number of the last one."""
        return self._guard.number

    @property
    def num_packs(self) -> int | None:
        """How a batch is packed, None or a number; set the same on all ranks. A negative one raises InvalidArgumentError."""
        return self._reductions.num_packs

    @num_packs.setter
    def num_packs(self, num_packs: int | None) -> None:
        self._reductions.num_packs = check_num_packs(num_packs)
        self._fast.clear()

    @property
    def is_strict(self) -> bool:
        """Whether every call is compared before it returns, including what `note` and `confirm` would compare later."""
        return self._calls.is_strict

    @is_strict.setter
    def is_strict(self, is_strict: bool) -> None:
        self._calls.is_strict = is_strict
        self._fast.clear()

    @property
    def model(self) -> CostModel:
        """The cost model of algorithm ``auto``."""
        return self._plans.model

    @property
    def path(self) -> str:
        """The transports used for arrays on GPUs, and why not faster ones; empty where ranks compute on CPUs."""
        return "" if self._gpu is None else str(self._gpu.executor.transports)

    def all_reduce(
        self, op: ReduceOp | str, arrays: Arrays, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
        """Combine each array across ranks. A collective call.

        Results on the GPU are ordered on the caller's current stream: work enqueued there afterwards sees them.

        Parameters
        ----------
        op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in upper or lower case; MEAN is SUM and one division by the number of ranks.
        arrays : ndarray or list of ndarray
            NumPy or CuPy arrays of any shapes and of dtypes that `ReduceOp` accepts, contiguous or not; shapes and dtypes are
            the same on all ranks. The arrays of a list are reduced together.
        options : CommunicationOptions, optional
            Override those of the communicator.
        out : ndarray or list of ndarray, optional
            C-contiguous arrays of the same shapes and dtypes for the results; they may be `arrays` themselves.

        Returns
        -------
        ndarray or list of ndarray
            `out`, or new arrays; never views of `arrays`.

        Raises
        ------
        UnsupportedDtypeError
            If `op` is not defined for a dtype.
        InvalidArgumentError
            If the operation is unknown, `out` has other shapes or dtypes, or the options cannot be used.
        """
        op = op if type(op) is ReduceOp else self._parsed(op, "all_reduce", options)
        given: Any = arrays
        targets: Any = out
        if is_one := not isinstance(given, (list, tuple)):
            given, targets = [given], None if out is None else [out]
        results = self.all_reduce_again(op, given, 0, 2, targets) if options is None else None
        if results is None:
            self._check_arrays("all_reduce", given, options)
            results = self._reductions.all_reduce(op, given, options, targets)
        return results[0] if is_one else results

    def all_reduce_again(
        self, op: ReduceOp, arrays: Sequence[Array], noted: int = 0, frames: int = 2, out: Sequence[Array] | None = None
    ) -> list[Array] | None:
        """Combine arrays by their fast path, if they have one: see `BaseCommunicator.all_reduce_again`. A collective call."""
        guard = self._guard
        path: OneArray | SmallBatch | KnownBatch | None
        try:
            if out is not None:
                path = self._fast.find_with_out(op, arrays, out)
            elif len(arrays) == 1:
                [array] = arrays
                path = self._fast_paths.get((op._value_, (array.shape, array.dtype, type(array))))
            else:
                path = self._fast_paths.get((op._value_, *map(SIGNATURE, arrays)))
        except AttributeError:  # not an array: the slow path raises the error
            return None
        if path is None or self.timeline.enabled or guard.refusal or not guard.lock.acquire(False):
            return None
        try:
            guard.number = number = guard.number + 1
            guard.signature = call = path.signature
            self._present.digest = key = path.digest ^ (guard.take_noted_digest(noted) if guard.noted else noted)
            index = guard.indexes.get(key) or guard.index(key, "all_reduce", call.text_after(key ^ call.digest), call.details)
            slot = self._recorder.enter(guard.communicator, number, index, frames + 1)
            if self._present.unconfirmed:
                self._present.count()
            results = path.run(arrays) if out is None or not isinstance(path, OneArray) else [path.combine(arrays[0], out[0])]
            self._recorder.leave(slot)
            return results
        except BaseException as error:
            self._recorder.fail(slot)
            raise guard.explain(error) from None
        finally:
            guard.lock.release()

    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
        structure: object = None,
    ) -> Work[Any]:
        """Start an asynchronous `all_reduce`; ``wait()`` of the returned handle returns its result. A collective call.

        Started operations run in the background, one after the other in the order of the calls; any other collective waits
        until they have completed. Until an operation has completed, the program must not write to `arrays` or use `out`. Its
        deadline counts from when it begins. An argument that this rank refuses raises here; errors that ranks find together,
        such as that their calls differ, are raised by the handle. On a GPU the operation begins after the work enqueued so far
        on the caller's current stream; once it has completed, every stream may read the results.

        Parameters
        ----------
        op, arrays, options, out : as for `all_reduce`, which lists the errors too
        structure : object, optional
            Structure of the nested value whose leaves are `arrays`: its text must be the same on all ranks.
        """
        given: Any = arrays
        targets: Any = out
        self._check_arrays("start_all_reduce", given, options)
        op = self._parsed(op, "start_all_reduce", options)
        if isinstance(given, (list, tuple)):
            return self._reductions.start_all_reduce(op, given, options, targets, structure)
        work = self._reductions.start_all_reduce(op, [given], options, None if out is None else [targets], structure)
        return work.then(lambda results: results[0])

    def reduce_scatter(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
    ) -> Any:
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
        op = self._parsed(op, "reduce_scatter", options)

        def one(array: Array, target: Array | None) -> Array:
            return self._reductions.reduce_scatter(op, array, axis, options, target)

        return self._each("reduce_scatter", one, arrays, out, options)

    def all_gather(
        self, arrays: Arrays, axis: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
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
        return self._each(
            "all_gather", lambda array, target: self._movement.all_gather(array, axis, options, target), arrays, out, options
        )

    def gather(self, arrays: Array | list[Array], root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the arrays of all ranks, in rank order, on rank `root`; None elsewhere. A collective call.

        Parameters
        ----------
        arrays : ndarray or list of ndarray
            The same shape and dtype on all ranks. For a list, a list of the results is returned.
        root, options : int, CommunicationOptions
            The rank that receives them; options that override those of the communicator.
        """
        return self._each("gather", lambda array, _: self._movement.gather(array, root, options), arrays, None, options)

    def all_to_all(self, arrays: Arrays, options: CommunicationOptions | None = None) -> Any:
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
        self._check_arrays("all_to_all", arrays, options)
        with self._reductions.active():
            if isinstance(arrays, (list, tuple)):
                return self._movement.all_to_all(arrays, options)
            return self._movement.all_to_all_parts(arrays, options)

    def broadcast(
        self, arrays: Arrays, root: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
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
        return self._each(
            "broadcast", lambda array, target: self._movement.broadcast(array, root, options, target), arrays, out, options
        )

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all ranks have entered the barrier. A collective call."""
        self._require_open()
        self._movement.barrier(options)

    def agree(self, call: str, error: Exception | None = None, options: CommunicationOptions | None = None) -> None:
        """Check at once that all ranks pass the same text: see `BaseCommunicator.agree`. A collective call."""
        self._require_open()
        with self._guard:
            self._guard.agree(self._calls.prepare_text(call, options), error)

    def note(self, text: str, options: CommunicationOptions | None = None) -> None:
        """Compare a text along with the next collective: see `BaseCommunicator.note`."""
        if self._calls.is_strict:
            self.agree(text, None, options)
        else:
            self._guard.note(text)

    def refuse(self, call: str, error: Exception, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise `error`, and raise on the other ranks: see `BaseCommunicator.refuse`."""
        self._require_open()
        with self._guard:
            self._calls.refuse(self._calls.prepare_text(call, options), error)

    def confirm(self) -> None:
        """Compare the calls that were not compared when they were made: see `BaseCommunicator.confirm`. A collective call."""
        if self._present.unconfirmed:
            with self._guard:
                self._present.settle()

    def choose(self, count: int, dtype: np.dtype[Any], options: CommunicationOptions | None = None) -> Choice:
        """Return the plan for a sum of `count` elements over all ranks, and why it was chosen. Sends nothing."""
        self._require_open()
        return self._plans.choose(count, dtype, self._options.merge(options))

    def explain(self, arrays: Array | Sequence[Array], options: CommunicationOptions | None = None) -> Explanation:
        """Return how a sum or mean of such arrays is computed, and how long the last one took. Sends nothing.

        Raises
        ------
        UnsupportedDtypeError, TransportError, InvalidArgumentError
            As `all_reduce`, where the arrays cannot be combined with these options.
        """
        self._require_open()
        given: Any = arrays if isinstance(arrays, (list, tuple)) else [arrays]
        wanted = self._options.merge(options)
        self._plans.check(ReduceOp.SUM, given, wanted)
        return self._plans.explain(given, wanted, self.num_packs)

    def memory_report(self) -> MemoryReport:
        """Return the memory this rank holds for communication, in bytes: windows, scratch memory and plans."""
        self._require_open()
        self._guard.wait_for_started()
        return self._plans.memory()

    def close(self, owner: str = "") -> None:
        """Free the scratch memory and the duplicated communicators; closing again does nothing. A collective call.

        After a collective has failed, here or on a peer, nothing is freed and no rank is waited for: peers may still use it.
        `owner` is the strategy that is closed, for the error of later calls; by default it is the communicator.
        """
        if self.is_closed:
            return
        self._fast.clear()
        self._guard.wait_for_started()
        if self._guard.is_broken():
            if self._gpu is not None:
                self._gpu.executor.abort("a collective has failed")
        else:
            with self._guard:
                self._calls.enter("close", lambda _: "()", None)  # all ranks free the memory together
            self.confirm()
            if self._gpu is not None:
                self._gpu.executor.close()
            self._plans.clear()
            self._executor.close()
            self.hierarchy.close()
        super().close(owner)

    def _require_open(self) -> None:
        if self.is_closed:
            self._guard.raise_if_failed()  # the error of a failed collective is more helpful
        super()._require_open()

    def _check_arrays(self, verb: str, arrays: Any, options: CommunicationOptions | None) -> None:
        """Check that the communicator is open and that these are arrays."""
        self._require_open()
        try:
            for array in arrays if isinstance(arrays, (list, tuple)) else [arrays]:
                check_array(array)
        except UnsupportedDtypeError as error:
            self.refuse(verb, error, options)

    def _parsed(self, op: ReduceOp | str, verb: str, options: CommunicationOptions | None) -> ReduceOp:
        try:
            return ReduceOp.parse(op)
        except (TypeError, InvalidArgumentError) as error:
            self.refuse(verb, error, options)

    def _each(
        self,
        verb: str,
        act: Callable[[Array, Array | None], Any],
        arrays: Array | Sequence[Array],
        out: Any,
        options: CommunicationOptions | None,
    ) -> Any:
        """Apply a verb to one array, or to each array of a list, which must be equally long on all ranks."""
        self._check_arrays(verb, arrays, options)
        if isinstance(arrays, (list, tuple)):
            if out is not None and len(out) != len(arrays):
                self.refuse(verb, InvalidArgumentError(f"out must hold {len(arrays)} arrays, one for each; got {len(out)}"))
            self.note(f"{verb} of {len(arrays)} arrays", options)
        with self._reductions.active():
            return for_each(act, arrays, out)

    def _say(self, text: str) -> None:
        if self._verbose:
            logger.info(text)


def by_algorithm(hierarchy: Hierarchy, name: str) -> Communicator:
    """Return a communicator for host memory that uses the named algorithm. A collective call."""
    return Communicator(hierarchy, CommunicationOptions(algorithm=name), model=DEFAULT, uses_gpu=False)
