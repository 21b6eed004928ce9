"""The kinds of disagreement, as data: what all ranks but one call, and what the odd one calls; and which cases there are.

Two kinds draw both from a seed (see `signatures`); they are not among the cases of every kind, but run by the thousand.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

import mpistrat
from mpistrat import VariableAggregation, VariableSynchronization
from mpistrat.experimental import CommunicationOptions
from mpistrat.reduction import ReduceOp
from tests.disagreements.case import Case, Plan
from tests.disagreements.signatures import draw, draw_program, make, with_disagreement

Calls = Callable[[Case], object]
Shape = Callable[[int], int | tuple[int, ...]] | int | tuple[int, ...] | None  # or what follows from the size of the case

SHAPES = ("1x2", "2x2", "1x4", "3+1")
SIZES = (1, 10, 20_000, 300_000)
LARGE = (*SIZES, 4_000_000)
FEW = (10, 300_000)
SMALL = (10, 20_000)
RIGHT, TOLD, REPORTED = frozenset({"right"}), frozenset({"told"}), frozenset({"reported"})
MAY_BE_RIGHT = RIGHT | TOLD  # ranks differ in what need not change a result
TOLD_OR_REPORTED = TOLD | REPORTED
_FOR_EVER = 3600.0


@dataclass(frozen=True)
class Kind:
    """One way to disagree."""

    name: str
    family: str  # what it belongs to, for tables
    usual: Calls  # what all ranks do but one
    odd: Calls  # what that one does
    sizes: tuple[int, ...] = SIZES  # numbers of elements it is tried with
    allowed: frozenset[str] = TOLD  # classes that a case may end in
    alone: bool = False  # whether the program ends in it: each case has a job of its own
    warm: str = "usual"  # what all ranks do before in a warm case: the ``usual`` calls, ``both``, or an ``other`` one
    says: str = r"AgreementError|UnavailableError|DeadlineExceededError"  # must be on stderr where the program ends in it

    def run(self, case: Case) -> None:
        """Do what this rank does."""
        case.pick(self.usual, self.odd)(case)

    def warm_up(self, case: Case) -> None:
        """Do what all ranks do before."""
        for calls in {"usual": (self.usual,), "both": (self.usual, self.odd), "other": (_sum(),)}[self.warm]:
            calls(case)


KINDS: dict[str, Kind] = {}


def _kind(family: str, name: str, usual: Calls, odd: Calls, **how: Any) -> None:
    KINDS[name] = Kind(name, family, usual, odd, **how)


def _operand(case: Case, shape: Shape, dtype: str) -> np.ndarray:
    return case.operand(shape(case.count) if callable(shape) else shape, dtype)


def _sum(shape: Shape = None, dtype: str = "float64", op: str = "sum", **options: Any) -> Calls:
    """Return an all_reduce of one array, with options."""
    chosen = {"options": CommunicationOptions(**options)} if options else {}
    return lambda case: case.all_reduce(op, _operand(case, shape, dtype), **chosen)


def _gather(shape: Shape = None, axis: int = 0, dtype: str = "float64") -> Calls:
    return lambda case: case.all_gather(_operand(case, shape, dtype), axis)


def _scatter(shape: Shape = None, axis: int = 0, op: str = "sum", **options: Any) -> Calls:
    chosen = CommunicationOptions(**options) if options else None
    return lambda case: case.reduce_scatter(op, _operand(case, shape, "float64"), axis, chosen)


def _nest(build: Callable[[Callable[..., np.ndarray], int], Any], **options: Any) -> Calls:
    """Return an all_reduce of the nest that a function builds of operands; it is given the size of the case too."""
    chosen = {"options": CommunicationOptions(**options)} if options else {}
    return lambda case: case.all_reduce("sum", build(case.operand, case.count), **chosen)


def _both(*calls: Calls) -> Calls:
    """Return calls one after the other."""
    return lambda case: [call(case) for call in calls]


def _longer(n: int) -> int:
    return n + max(1, n // 5)


# One rank hands another array to the same call.

_kind("length", "shorter", _sum(), _sum(lambda n: n - max(1, n // 5)), sizes=LARGE)
_kind("length", "longer", _sum(), _sum(_longer), sizes=LARGE)
_kind("length", "twice_as_long", _sum(), _sum(lambda n: 2 * n), sizes=LARGE)


def _into(shape: Shape) -> Calls:
    """Return an all_reduce into memory of the caller."""

    def call(case: Case) -> None:
        operand = _operand(case, shape, "float64")
        target = case.memory.array(operand.shape, "float64")
        case.strategy.extended.communicator.all_reduce(ReduceOp.SUM, [operand], out=[target])
        case.look("all_reduce out", target, case.totals("sum", operand))

    return call


def _to_each(case: Case, lacking: int = 0) -> None:
    """Send an operand to all ranks, or to fewer than there are."""
    array = case.operand()
    case.run(lambda context: context.all_to_all([array] * (case.size - lacking)))
    case.turn += 1


_kind("length", "longer_by_one", _sum(), _sum(lambda n: n + 1))
_kind("length", "all_others_longer", _sum(_longer), _sum())
_kind("length", "longer_out", _into(None), _into(_longer))
_kind("length", "empty", _sum(), _sum(0))
_kind("length", "scatter_length", _scatter(), _scatter(_longer))
_kind("length", "all_to_all_too_few", _to_each, lambda case: _to_each(case, case.is_odd))
_kind("shape", "scalar", _sum((1,)), _sum(()), sizes=(1,))
_kind("shape", "column", _sum(), _sum(lambda n: (n, 1)))
_kind("shape", "transposed", _sum(lambda n: (2, max(n // 2, 1))), _sum(lambda n: (max(n // 2, 1), 2)))
_kind("dtype", "dtype_int32", _sum(dtype="float32"), _sum(dtype="int32"), sizes=LARGE)
_kind("dtype", "dtype_int64", _sum(), _sum(dtype="int64"))
_kind("dtype", "dtype_wider", _sum(dtype="float32"), _sum())
_kind("dtype", "dtype_half", _sum(dtype="float16"), _sum(dtype="bfloat16"))
_kind("dtype", "dtype_unsigned", _sum(dtype="int8", op="max"), _sum(dtype="uint8", op="max"))
_kind("dtype", "dtype_same_bytes", _sum(lambda n: 2 * n, "float32"), _sum())
_kind("dtype", "gather_dtype", _gather(dtype="float32"), _gather(dtype="int32"))
_kind(
    "dtype",
    "all_to_all_dtype",
    lambda case: case.all_to_all(case.operand(dtype="float32")),
    lambda case: case.all_to_all(case.operand(dtype="int32")),
)


def _big_endian(case: Case) -> None:
    operand = case.operand()
    turned = np.ascontiguousarray(operand.astype(">f8"))
    result = case.run(lambda context: context.all_reduce("sum", turned))
    case.look("all_reduce", np.asarray(result, np.float64), case.totals("sum", operand))


_kind("dtype", "dtype_big_endian", _sum(), _big_endian, allowed=MAY_BE_RIGHT)


# One rank passes another nest of arrays.


def _thirty(longer: int = 0, dtype: str = "float32") -> Calls:
    """Return an all_reduce of thirty arrays, of which one is longer, or has another dtype."""
    return _nest(
        lambda x, n: [x(max(n // 30, 1) + longer * (index == 17), dtype if index == 17 else "float32") for index in range(30)]
    )


def _slices(width: int, beyond: int) -> Calls:
    """Return an all_reduce of rows so wide, of a dense array that has so many rows more."""

    def call(case: Case) -> None:
        rows = case.operand((case.count, width))
        slices = mpistrat.IndexedSlices(rows, np.arange(case.count), (case.count + beyond, width))
        result = case.run(lambda context: context.all_reduce("sum", slices))
        case.look("all_reduce slices", result.values, case.totals("sum", rows))

    return call


_TWO = _nest(lambda x, n: {"a": x(), "b": x(7)})
_kind("nest", "dict_and_list", _TWO, _nest(lambda x, n: [x(), x(7)]))
_kind("nest", "leaf_missing", _TWO, _nest(lambda x, n: {"a": x()}))
_kind("nest", "leaf_none", _TWO, _nest(lambda x, n: {"a": x(), "b": None}))
_kind("nest", "leaf_more", _nest(lambda x, n: [x()]), _nest(lambda x, n: [x(), x()]))
_kind("nest", "nested_deeper", _nest(lambda x, n: [x(), x()]), _nest(lambda x, n: [[x()], [x()]]))
_kind("nest", "keys_renamed", _nest(lambda x, n: {"a": x(), "b": x()}), _nest(lambda x, n: {"a": x(), "c": x()}))
_kind("nest", "leaves_swapped", _nest(lambda x, n: [x(), x(n + 3)]), _nest(lambda x, n: [x(n + 3), x()]))
_kind("nest", "cut_elsewhere", _nest(lambda x, n: [x(n + 4), x(n + 4)]), _nest(lambda x, n: [x(n + 2), x(n + 6)]))
_kind("nest", "many_leaves_one_longer", _thirty(), _thirty(longer=5))
_kind("nest", "many_leaves_one_dtype", _thirty(), _thirty(dtype="int32"))
_kind("slices", "slices_and_dense", _sum(lambda n: (n, 2)), _slices(2, 0))
_kind("slices", "slices_dense_shape", _slices(2, 5), _slices(2, 9))
_kind("slices", "slices_width", _slices(2, 0), _slices(3, 0))


# One rank passes another operation, axis, root or option.


def _unknown(case: Case) -> None:
    case.run(lambda context: context.all_reduce("average", case.operand()))


def _reduce_over(axis: int | None) -> Calls:
    return lambda case: case.reduce("sum", case.operand((case.count, 2)), axis)


def _square(axis: int) -> Calls:
    """Return a gather of a square array, of which as many elements come back along either axis."""
    return _gather(lambda n: (max(int(n**0.5), 1),) * 2, axis)


_kind("operation", "op_max", _sum(), _sum(op="max"), sizes=LARGE)
_kind("operation", "op_mean", _sum(), _sum(op="mean"))
_kind("operation", "op_prod", _sum(), _sum(op="prod"))
_kind("operation", "op_min_max", _sum(dtype="float32", op="max"), _sum(dtype="float32", op="min"))
_kind("operation", "op_unknown", _sum(), _unknown)
_kind("operation", "op_of_scatter", _scatter(lambda n: (n, 4)), _scatter(lambda n: (n, 4), op="max"))
_kind(
    "operation",
    "weighted",
    _sum(op="mean"),
    lambda case: case.all_reduce("mean", case.operand(), weight=1.0),
    allowed=MAY_BE_RIGHT,
)
_kind("axis", "gather_axis", _gather(lambda n: (n, 2)), _gather(lambda n: (n, 2), 1))
_kind("axis", "gather_axis_of_square", _square(0), _square(1))
_kind("axis", "gather_number_of_axes", _gather(), _gather(lambda n: (n, 1)))
_kind("axis", "gather_extents", _gather(lambda n: (n, 2)), _gather(lambda n: (n, 3)))
_kind("axis", "scatter_axis", _scatter(lambda n: (2 * n, 8)), _scatter(lambda n: (2 * n, 8), 1))
_kind("axis", "reduce_axis", _reduce_over(None), _reduce_over(0))
_kind("root", "broadcast_root", lambda case: case.broadcast(case.operand()), lambda case: case.broadcast(case.operand(), 1))


def _strategy_with(lists: bool = False, **arguments: Any) -> Calls:
    """Return what makes a strategy with other arguments, and reduces two arrays by it if asked to."""

    def call(case: Case) -> None:
        strategy = mpistrat.MultiWorkerMirroredStrategy(**arguments)
        case.kept.append(strategy)
        if lists:
            other = _other_case(case, strategy)
            other.all_reduce("sum", [other.operand(), other.operand()])
            case.values += other.values
        strategy.close()

    return call


def _other_case(case: Case, strategy: Any) -> Case:
    other = Case(case.plan, case.rank, case.size, case.memory, strategy)
    other.odd = case.odd
    return other


def _packs(nbytes: int) -> Calls:
    return _nest(lambda x, n: [x(max(n // 5, 1), "float32") for _ in range(5)], bytes_per_pack=nbytes)


_WIRE: dict[str, Any] = {"wire_dtype": "bfloat16", "algorithm": "hierarchical"}
_PLAIN = _sum(dtype="float32")
_kind(
    "options",
    "algorithm",
    _sum(dtype="float32", algorithm="flat"),
    _sum(dtype="float32", algorithm="hierarchical"),
    allowed=MAY_BE_RIGHT,
)
_kind("options", "algorithm_alone", _PLAIN, _sum(dtype="float32", algorithm="hierarchical"), allowed=MAY_BE_RIGHT)
_kind("options", "algorithm_of_scatter", _scatter(algorithm="hierarchical"), _scatter(algorithm="flat"), allowed=MAY_BE_RIGHT)
_kind("options", "deterministic_scatter", _scatter(), _scatter(deterministic=True), allowed=MAY_BE_RIGHT)
_kind("options", "wire_dtype", _PLAIN, _sum(dtype="float32", wire_dtype="bfloat16"), allowed=MAY_BE_RIGHT)
_kind(
    "options",
    "wire_dtypes",
    _sum(dtype="float32", **_WIRE),
    _sum(dtype="float32", **{**_WIRE, "wire_dtype": "float16"}),
    allowed=MAY_BE_RIGHT,
)
_kind("options", "bytes_per_pack", _packs(1 << 20), _packs(4096), allowed=MAY_BE_RIGHT)
_kind("options", "deterministic", _PLAIN, _sum(dtype="float32", deterministic=True), allowed=MAY_BE_RIGHT)
_kind("options", "deadline", _PLAIN, _sum(dtype="float32", timeout_seconds=5.0), allowed=MAY_BE_RIGHT)
_kind(
    "options",
    "error_feedback",
    _sum(dtype="float32", **_WIRE),
    _sum(dtype="float32", **_WIRE, error_feedback=True),
    allowed=MAY_BE_RIGHT,
)
_kind(
    "options",
    "num_packs",
    _strategy_with(True, num_packs=1),
    _strategy_with(True, num_packs=3),
    allowed=MAY_BE_RIGHT,
    sizes=SMALL,
)
_kind(
    "options",
    "options_of_the_strategy",
    _strategy_with(),
    _strategy_with(communication_options=CommunicationOptions(bytes_per_pack=4096)),
    allowed=MAY_BE_RIGHT,
    sizes=SMALL,
)
_kind("options", "deadline_and_longer", _sum(timeout_seconds=5.0), _sum(_longer, timeout_seconds=5.0))
_kind(
    "options",
    "deterministic_order",
    _sum(dtype="float32", deterministic=True),
    _sum(_longer, dtype="float32", deterministic=True),
)


# One rank makes another call.


def _merge(case: Case) -> None:
    """Reduce in a merge_call."""
    array = case.operand()
    result = case.run(lambda context: context.merge_call(lambda strategy, value: strategy.reduce("sum", value, None), (array,)))
    case.look("merge_call", result, case.totals("sum", array))


def _merge_nothing(case: Case) -> None:
    case.run(lambda context: context.merge_call(lambda strategy: None))


def _broadcast(case: Case) -> None:
    case.broadcast(case.operand())


def _broadcast_from_itself(case: Case) -> None:
    case.broadcast(case.operand(), case.rank if case.is_odd else 0)


_kind("verb", "all_gather", _sum(), _gather(), sizes=LARGE, warm="both")
_kind("verb", "broadcast", _sum(), _broadcast, warm="both")
_kind("verb", "broadcast_from_itself", _sum(), _broadcast_from_itself, warm="both")
_kind("verb", "gather", _sum(), lambda case: case.gather(case.operand()), warm="both")
_kind("verb", "barrier", _sum(), Case.barrier, warm="both")
_kind("verb", "reduce_scatter", _sum(), _scatter(), warm="both")
_kind("verb", "all_to_all", _sum(), lambda case: case.all_to_all(case.operand()), warm="both")
_kind("verb", "strategy_reduce", _sum(), lambda case: case.reduce("sum", case.operand()), warm="both", allowed=MAY_BE_RIGHT)
_kind("verb", "gather_and_broadcast", _gather(), _broadcast)
_kind("verb", "scatter_and_gather", _scatter(), _gather())
_kind("verb", "barrier_and_gather", Case.barrier, _gather())
_kind("verb", "merge_call_alone", _sum(op="max"), _merge)
_kind("verb", "merge_call_more", _sum(), _both(_merge_nothing, _sum()), allowed=MAY_BE_RIGHT)


# One rank makes the same calls in another order, one more or one less.

_FIRST, _SECOND, _THIRD = _sum(), _sum(lambda n: n + 2, op="max"), _sum(5, "float32")


def _on_a_thread(case: Case) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_FIRST, case).result()


def _started(*shapes: Shape) -> Calls:
    """Return reductions that are all started before the first is waited for."""

    def call(case: Case) -> None:
        for handle in [case.start("sum", _operand(case, shape, "float64")) for shape in shapes]:
            case.wait(handle)

    return call


def _never_waited(case: Case) -> None:
    case.kept.append(case.start("sum", case.operand()))
    case.turn += 1  # the next operands are those of the next call all the same


def _waited_backwards(case: Case) -> None:
    for handle in [case.start("sum", case.operand(count)) for count in (case.count, case.count + 2)][::-1]:
        case.wait(handle)


_kind("order", "two_swapped", _both(_FIRST, _SECOND, _THIRD), _both(_SECOND, _FIRST, _THIRD))
_kind("order", "one_left_out", _both(_FIRST, _SECOND, _THIRD), _both(_FIRST, _THIRD))
_kind("order", "one_too_many", _both(_FIRST, _SECOND, _THIRD), _both(_FIRST, _SECOND, _SECOND, _THIRD))
_kind("order", "one_of_equal_left_out", _both(*[_FIRST] * 5), _both(*[_FIRST] * 4))
_kind("order", "last_left_out", _both(_THIRD, _FIRST), _THIRD)
_kind("order", "barrier_left_out", _both(_FIRST, Case.barrier, _THIRD), _both(_FIRST, _THIRD))
_kind("order", "barriers_only", _both(*[Case.barrier] * 3), _both(*[Case.barrier] * 4))
_kind("order", "started_in_other_order", _started(None, lambda n: n + 2), _started(lambda n: n + 2, None))
_kind("order", "started_longer", _started(None), _started(_longer))
_kind("order", "started_more", _started(None, None), _started(None, None, None))
_kind("order", "thread_before_main", _both(_FIRST, _on_a_thread), _both(_on_a_thread, _FIRST), sizes=(1, 20_000))
_kind("order", "started_not_called", _sum(), _started(None), allowed=MAY_BE_RIGHT)
_kind("order", "started_never_waited", _started(None), _never_waited, allowed=MAY_BE_RIGHT)


# One rank makes or changes another variable, or another strategy.

_SUM, _MEAN = VariableAggregation.SUM, VariableAggregation.MEAN


def _variable(shape: Shape = None, dtype: str = "float64") -> Calls:
    return lambda case: case.variable(_operand(case, shape, dtype))


def _assigned(method: str, aggregation: Any = _SUM) -> Calls:
    """Return what makes a variable, and changes it on all replicas, or leaves it where no method is said."""

    def call(case: Case) -> None:
        made = case.variable(case.operand(), aggregation=aggregation)
        if method:
            operand = case.operand(made.shape)
            expected = case.totals("sum", operand)
            case.run(lambda context: getattr(made, method)(operand))
            case.look(method, np.array(made.numpy()), expected)

    return call


def _assigned_one_of_two(index: int) -> Calls:
    def call(case: Case) -> None:
        variables = [case.variable(case.operand(), aggregation=_SUM, name=name) for name in "ab"]
        operand = case.operand()
        expected = case.totals("sum", operand)
        case.run(lambda context: variables[index].assign(operand))
        case.look("assign", variables[0].numpy(), expected)

    return call


def _on_read(is_read: bool) -> Calls:
    def call(case: Case) -> None:
        made = case.variable(case.operand(), aggregation=_SUM, synchronization=VariableSynchronization.ON_READ)
        if is_read:
            made.numpy()
        case.all_reduce("sum", case.operand())

    return call


_kind("variable", "variable_alone", _sum(), _both(_variable(), _sum()))
_kind("variable", "variable_missing", _both(_variable(), _sum()), _sum())
_kind(
    "variable",
    "variables_in_other_order",
    _both(_variable(), _variable(lambda n: n + 2)),
    _both(_variable(lambda n: n + 2), _variable()),
)
_kind("variable", "variable_shape", _variable(), _variable(_longer))
_kind("variable", "variable_dtype", _variable(dtype="float32"), _variable(dtype="int32"))
_kind("variable", "variable_aggregation", _assigned("assign"), _assigned("assign", _MEAN))
_kind("variable", "assigned_alone", _both(_assigned(""), _sum()), _both(_assigned("assign"), _sum()))
_kind("variable", "assigned_otherwise", _assigned_one_of_two(0), _assigned_one_of_two(1))
_kind("variable", "added_and_assigned", _assigned("assign"), _assigned("assign_add"))
_kind("variable", "read_alone", _on_read(False), _on_read(True), warm="both")


def _strategy(case: Case) -> None:
    case.kept.append(mpistrat.MultiWorkerMirroredStrategy())


def _mirrored(case: Case) -> None:
    case.kept.append(mpistrat.MirroredStrategy())


def _two_strategies(*order: int) -> Calls:
    """Return a call of each in an order: 0 is the case's strategy, 1 a second one."""

    def call(case: Case) -> None:
        both = (case, _other_case(case, mpistrat.MultiWorkerMirroredStrategy()))
        case.kept.append(both[1])
        for index in order:
            both[index].all_reduce("sum", both[index].operand())
        case.values += both[1].values

    return call


_kind(
    "strategy",
    "two_strategies_in_other_order",
    _two_strategies(0, 1),
    _two_strategies(1, 0),
    sizes=FEW,
    allowed=TOLD_OR_REPORTED,
    warm="other",
)
_kind(
    "strategy",
    "one_step_of_a_second_strategy_left_out",
    _two_strategies(1, 0),
    _two_strategies(0),
    sizes=FEW,
    allowed=TOLD_OR_REPORTED,
    warm="other",
)
_kind("strategy", "strategy_alone", _sum(), _both(_strategy, _sum()), sizes=FEW, allowed=TOLD_OR_REPORTED, warm="other")
_kind("strategy", "strategy_missing", _both(_strategy, _sum()), _sum(), sizes=FEW, allowed=TOLD_OR_REPORTED, warm="other")
_kind("strategy", "other_strategy", _strategy, _mirrored, sizes=(10,), warm="other")
_kind("strategy", "closed_alone", _sum(), lambda case: case.strategy.close(), sizes=FEW, warm="other")


# One rank does not come at all, or its program ends.


def _computes(case: Case) -> None:
    end, total = time.monotonic() + _FOR_EVER, 0
    while time.monotonic() < end:
        total += 1


def _sleeps(case: Case) -> None:
    time.sleep(_FOR_EVER)


def _raises(case: Case) -> NoReturn:
    raise ValueError("a rank fails here")


def _feed(fails: bool) -> Calls:
    """Return steps on batches from a generator, which raises in the middle or does not."""

    def batches() -> Iterator[np.ndarray]:
        for number in range(6):
            if fails and number == 3:
                raise FileNotFoundError("no such file of rows")
            yield np.full(2, float(number))

    def call(case: Case) -> None:
        for batch in case.strategy.distribute_datasets_from_function(lambda context: batches()):
            case.run(lambda context, batch=batch: context.all_reduce("sum", batch.values[0]))

    return call


def _late(case: Case) -> None:
    time.sleep(1.0)
    case.all_reduce("sum", case.operand())


def _interrupted(case: Case) -> None:
    """Have a signal handler raise while this rank waits in a collective, which others then come to in vain."""
    with suppress(InterruptedError), _interrupted_after(0.3):
        case.all_reduce("sum", case.operand())
    case.all_reduce("sum", case.operand())


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _started_and_left(shape: Shape) -> Calls:
    return lambda case: case.kept.append(case.start("sum", _operand(case, shape, "float64")))


_kind("absent", "computes", _sum(), _computes, sizes=FEW, allowed=REPORTED, warm="other")
_kind("absent", "sleeps", _sum(), _sleeps, sizes=FEW, allowed=REPORTED, warm="other")
_kind("absent", "sleeps_before_a_gather", _gather(), _sleeps, sizes=FEW, allowed=REPORTED, warm="other")
_kind("absent", "sleeps_before_a_variable", _variable(), _sleeps, sizes=(10,), allowed=REPORTED, warm="other")
_kind("absent", "sleeps_before_a_barrier", Case.barrier, _sleeps, sizes=(10,), allowed=REPORTED, warm="other")
_kind("absent", "interrupted", _late, _interrupted, sizes=FEW, warm="other")
_kind("absent", "raises", _sum(), _raises, alone=True, warm="other", sizes=FEW, says=r"(?i)a rank fails here")
_kind(
    "absent", "data_raises", _feed(False), _feed(True), alone=True, warm="other", sizes=(10,), says=r"(?i)no such file of rows"
)
_kind(
    "absent",
    "ends",
    _sum(),
    lambda case: None,
    alone=True,
    warm="other",
    sizes=FEW,
    allowed=TOLD_OR_REPORTED,
    says=r"(?is)(rank \d+).*(end|gone|exit|left)",
)
for _name, _leave in (("exits", lambda case: sys.exit(3)), ("vanishes", lambda case: os._exit(7))):
    _kind("absent", _name, _sum(), _leave, alone=True, warm="other", sizes=(10,), allowed=TOLD_OR_REPORTED, says=r"exit:[1-9]")
_kind(
    "order",
    "started_longer_and_ended",
    _started_and_left(None),
    _started_and_left(_longer),
    alone=True,
    warm="other",
    sizes=FEW,
)
_kind("order", "last_call_more", _both(*[_sum()] * 3), _both(*[_sum()] * 4), alone=True, warm="other", sizes=FEW)
_kind("order", "last_call_longer", _sum(), _sum(_longer), alone=True, warm="other", sizes=FEW)


# What ranks may do differently: the result must be right on all of them.


def _by_the_communicator(case: Case) -> None:
    operand = case.operand()
    expected = case.totals("sum", operand)
    case.look("all_reduce", case.strategy.communicator.all_reduce("sum", operand), expected)


def _strided(is_copied: bool) -> Calls:
    """Return an all_reduce of every second element of an array, or of their copy."""

    def call(case: Case) -> None:
        array = case.memory.array(2 * case.count, "float64")[::2]
        case.fill(array)
        case.all_reduce("sum", array.copy() if is_copied else array)

    return call


def _read_only(case: Case) -> None:
    array = case.operand()
    array.flags.writeable = False
    case.all_reduce("sum", array)


def _number(is_python: bool) -> Calls:
    """Return an all_reduce of an array without axes, or of a number."""

    def call(case: Case) -> None:
        array = case.operand(())
        expected = case.totals("sum", array)
        result = case.run(lambda context: context.all_reduce("sum", float(array) if is_python else array))
        case.look("all_reduce", np.asarray(result), expected)

    return call


def _rows_differ(case: Case) -> None:
    array = case.operand((case.count + 3 * case.is_odd, 2))
    result = case.run(lambda context: context.all_gather(array, 0))
    parts = [case.component(rank, (case.count + 3 * (rank == case.odd), 2), array.dtype) for rank in range(case.size)]
    case.look("all_gather", result, lambda: np.concatenate(parts))


def _receives_another_shape(case: Case) -> None:
    root = 0 if case.odd is None else (case.odd + 1) % case.size
    array = case.operand(case.count + 3, "int8") if case.is_odd else case.operand()
    result = case.run(lambda context: context.broadcast(array, root))
    case.look("broadcast", result, lambda: case.component(root, case.count, np.float64))


def _half_a_second_late(case: Case) -> None:
    time.sleep(0.5)
    case.all_reduce("sum", case.operand())


def _data_ends_early(case: Case) -> None:
    """Take steps on batches of a generator that ends early on the odd rank: every row of every rank counts, once."""
    counts = [4 if rank == case.odd else 6 for rank in range(case.size)]
    batches = [np.full(2, float(number)) for number in range(counts[case.rank])]
    rows = 0
    for batch in case.strategy.distribute_datasets_from_function(lambda context: iter(batches)):
        total = case.run(lambda context, batch=batch: context.all_reduce("sum", np.float64(len(batch.values[0]))))
        rows += int(total)
    case.look("rows", np.asarray(rows), lambda: np.asarray(2 * sum(counts)))


def _second_strategy(case: Case) -> None:
    """Use a second strategy by turns; the odd rank makes calls between that stay on it."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    other = _other_case(case, strategy)
    for _ in range(3):
        case.all_reduce("sum", case.operand())
        if case.is_odd:
            strategy.explain(np.ones(3))
        other.all_reduce("sum", other.operand())
    case.values += other.values
    strategy.close()


_ALL_EQUAL = _both(
    _sum(), lambda case: case.all_reduce("mean", {"a": case.operand(7, "float32"), "b": case.operand((3, 2), "float32")})
)
_TAKING_TURNS = _both(_FIRST, _on_a_thread, _FIRST, _on_a_thread)
_kind("legal", "out_alone", _sum(), _into(None), allowed=RIGHT, sizes=LARGE, warm="both")
_kind("legal", "nothing_differs", _ALL_EQUAL, _ALL_EQUAL, allowed=RIGHT, sizes=LARGE, warm="both")
_kind("legal", "communicator_and_context", _sum(), _by_the_communicator, allowed=RIGHT, warm="both")
_kind("legal", "not_contiguous", _strided(True), _strided(False), allowed=RIGHT, warm="both")
_kind("legal", "rows_differ", _rows_differ, _rows_differ, allowed=RIGHT, warm="both")
_kind("legal", "shape_of_others_in_broadcast", _receives_another_shape, _receives_another_shape, allowed=RIGHT, warm="both")
_kind("legal", "waited_in_other_order", _started(None, lambda n: n + 2), _waited_backwards, allowed=RIGHT, warm="both")
_kind(
    "legal",
    "not_aligned",
    _sum(),
    lambda case: case.all_reduce("sum", case.operand(misaligned=1)),
    allowed=RIGHT,
    sizes=(1, *FEW),
)
_kind("legal", "read_only", _sum(), _read_only, allowed=RIGHT, sizes=(1, *FEW))
_kind("legal", "python_number", _number(False), _number(True), allowed=RIGHT, sizes=(1,))
_kind("legal", "late_by_a_little", _sum(), _half_a_second_late, allowed=RIGHT, sizes=SMALL)
_kind("legal", "thread_after_main", _TAKING_TURNS, _TAKING_TURNS, allowed=RIGHT, sizes=(1, 20_000))
_kind("legal", "data_ends_early", _data_ends_early, _data_ends_early, allowed=RIGHT, sizes=(10,), warm="other")
_kind("legal", "second_strategy", _second_strategy, _second_strategy, allowed=RIGHT, sizes=FEW, warm="other")


# What is drawn from a seed.

_MAY_DIFFER = ("all_gather", "broadcast", "barrier")  # in some shapes; and barriers are all alike
_PAIRED = ("all_reduce",) * 6 + ("reduce", "all_gather", "broadcast", "reduce_scatter", "barrier")


def _drawn_program(case: Case) -> None:
    """Walk through 5 to 15 calls; the odd rank differs in one place."""
    random_ = random.Random(case.seed)
    calls = draw_program(random_, case.size, case.count)
    what, odd = with_disagreement(random_, calls, case.size, case.count)
    case.note(what)
    for call in case.pick(calls, odd):
        make(case, call)


def _drawn_pair(case: Case) -> None:
    """Make one of two calls, after both were made by all ranks."""
    random_ = random.Random(case.seed)
    least = max(case.count // 50, 1)  # most go through shared memory
    usual = odd = draw(random_, case.size, case.count, _PAIRED, least)
    if random_.random() < 0.9:
        while odd.verb == usual.verb and (odd == usual or odd.verb in _MAY_DIFFER):
            odd = draw(random_, case.size, case.count, _PAIRED, least)
    case.must_be_told = odd != usual
    case.note(f"{usual} and {odd}")
    if case.plan.warm:
        case.in_step(lambda: [make(case, call) for call in (usual, odd)])
    make(case, case.pick(usual, odd))


_kind("drawn", "drawn_program", _drawn_program, _drawn_program, sizes=())
_kind("drawn", "drawn_pair", _drawn_pair, _drawn_pair, sizes=(), warm="other", allowed=MAY_BE_RIGHT)


# Which cases there are.


def plan_of(kind: Kind, count: int, warm: bool, ranks: int, seed: int = 0) -> Plan:
    """Return a case; its odd rank is always the same one, and first and warm have different ones."""
    odd = zlib.crc32(f"{kind.name} {count} {seed}".encode()) + warm
    return Plan(kind.name, count, warm, odd % ranks, seed)


def all_plans(ranks: int, names: Collection[str] = KINDS) -> Iterator[Plan]:
    """Yield every case of some kinds, or of all."""
    for kind in map(KINDS.__getitem__, names):
        for count in kind.sizes:
            for warm in (False, True):
                yield plan_of(kind, count, warm, ranks)


def quick_plans(ranks: int, names: Collection[str] = KINDS, share: float = 1.0) -> list[Plan]:
    """Return one small and one large case of each kind, one first and one warm; of a share of all, always the same."""
    plans = []
    for kind in map(KINDS.__getitem__, names):
        draw_ = random.Random(f"{kind.name} {ranks}")
        if not kind.sizes or draw_.random() >= share:
            continue
        small, large = (draw_.choice(sizes) for sizes in (kind.sizes[:2], kind.sizes[-3:]))
        warm = draw_.random() < 0.5
        plans.append(plan_of(kind, small, warm, ranks))
        if large not in (small, 4_000_000):
            plans.append(plan_of(kind, large, not warm, ranks))
    return plans


def drawn_plans(name: str, ranks: int, count: int, most: int, first_seed: int = 1) -> Iterator[Plan]:
    """Yield so many cases of a kind that draws what it does; each a few elements or up to `most`."""
    for seed in range(first_seed, first_seed + count):
        draw_ = random.Random(seed)
        yield plan_of(KINDS[name], draw_.choice((10, 1000, 20_000, most)), draw_.random() < 0.5, ranks, seed)
