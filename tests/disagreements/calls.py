"""Calls as data: a verb with its arguments; how a rank makes one, and looks whether what came of it is right."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat import VariableAggregation, VariableSynchronization
from tests.disagreements.case import Case
from tests.reference import of_verb

ITSELF = -1  # as `Call.place`: the rank that makes the call
_FOR_EVER, _LATE_SECONDS = 3600.0, 0.8


@dataclass(frozen=True)
class Call:
    verb: str  # of VERBS
    shape: tuple[int, ...] = ()
    op: str = "sum"  # of a variable: how it is aggregated
    dtype: str = "float64"
    place: int | None = None  # axis, root, index of a variable, ...
    options: Mapping[str, Any] = field(default_factory=dict)  # of communication; of a strategy: its arguments
    form: str = "array"  # of FORMS: which nest of arrays it is
    layout: str = ""  # how the array lies in memory: see `Case.operand`
    is_on_thread: bool = False
    strategy: int = 0  # 0 is the one of the case, 1 the first that the calls before have made

    def __str__(self) -> str:
        usual = {one.name: one.default for one in fields(self)}
        given = {name: value for name, value in vars(self).items() if name != "verb" and value and value != usual[name]}
        return f"{self.verb}({', '.join(f'{name}={value}' for name, value in given.items())})"


Operand = Callable[..., np.ndarray]  # of a shape, and of another dtype than that of the call


def _longer_by(more: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] + more, *shape[1:])


def _thirty(x: Operand, shape: tuple[int, ...], more: int = 0, **dtype: str) -> list[np.ndarray]:
    """Return thirty arrays, of which one is longer, or has another dtype."""
    part = max(shape[0] // 30, 1)
    return [x((part + more,), **dtype) if index == 17 else x((part,)) for index in range(30)]


FORMS: dict[str, Callable[[Operand, tuple[int, ...]], Any]] = {
    "array": lambda x, shape: x(shape),
    "one": lambda x, shape: [x(shape)],
    "two": lambda x, shape: [x(shape), x(shape)],
    "deeper": lambda x, shape: [[x(shape)], [x(shape)]],
    "dict": lambda x, shape: {"a": x(shape), "b": x((7,))},
    "list": lambda x, shape: [x(shape), x((7,))],
    "leaf_missing": lambda x, shape: {"a": x(shape)},
    "leaf_none": lambda x, shape: {"a": x(shape), "b": None},
    "keys": lambda x, shape: {"a": x(shape), "b": x(shape)},
    "keys_renamed": lambda x, shape: {"a": x(shape), "c": x(shape)},
    "short_and_long": lambda x, shape: [x(shape), x(_longer_by(3, shape))],
    "long_and_short": lambda x, shape: [x(_longer_by(3, shape)), x(shape)],
    "cut": lambda x, shape: [x(_longer_by(4, shape)), x(_longer_by(4, shape))],
    "cut_elsewhere": lambda x, shape: [x(_longer_by(2, shape)), x(_longer_by(6, shape))],
    "five": lambda x, shape: [x((max(shape[0] // 5, 1),)) for _ in range(5)],
    "thirty": _thirty,
    "thirty_one_longer": lambda x, shape: _thirty(x, shape, 5),
    "thirty_one_int32": lambda x, shape: _thirty(x, shape, dtype="int32"),
    "slices": lambda x, shape: _slices(x(shape), 0),
    "slices_of_more_rows": lambda x, shape: _slices(x(shape), 5),
}


def _slices(rows: np.ndarray, beyond: int) -> mpistrat.IndexedSlices:
    return mpistrat.IndexedSlices(rows, np.arange(len(rows)), (len(rows) + beyond, *rows.shape[1:]))


def make(case: Case, call: Call) -> None:
    verb = partial(VERBS[call.verb], case, call)
    if call.is_on_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(verb).result()
    else:
        verb()
    case.turn += call.verb not in {*LOCAL, "close"}


def _array(case: Case, call: Call) -> np.ndarray:
    return case.operand(call.shape, call.dtype, call.layout)


def _nest(case: Case, call: Call) -> Any:
    return FORMS[call.form](lambda shape, dtype=call.dtype: case.operand(shape, dtype, call.layout), call.shape)


def _dense(value: Any) -> Any:
    return value.values if isinstance(value, mpistrat.IndexedSlices) else value


def _options(call: Call) -> mpistrat.experimental.CommunicationOptions | None:
    return mpistrat.experimental.CommunicationOptions(**call.options) if call.options else None


def _run(case: Case, call: Call, function: Callable[[Any], Any]) -> Any:
    """Call a function of the replica context in ``strategy.run``, and return what it returned."""
    returned = []
    case.strategies[call.strategy].run(lambda: returned.append(function(mpistrat.get_replica_context())))
    return returned[0]


def _parts(case: Case) -> list[np.ndarray]:
    """Return what each rank hands to this call, in which they may differ."""
    return [case.component(rank, call.shape, call.dtype) for rank, call in enumerate(case.calls)]


def _all_reduce(case: Case, call: Call, **weight: float) -> None:
    value = _nest(case, call)
    result = _run(case, call, lambda context: context.all_reduce(call.op, value, _options(call), **weight))
    case.look("all_reduce", _dense(result), case.totals(call.op, _dense(value)))


def _start(case: Case, call: Call) -> None:
    value = _nest(case, call)
    work = _run(case, call, lambda context: context.start_all_reduce(call.op, value, _options(call)))
    case.started.append((work, case.totals(call.op, value)))


def _wait(case: Case, call: Call) -> None:
    """Wait for all that was started, the last one first if there is a place."""
    works, case.started = case.started[:: 1 if call.place is None else -1], []
    for work, expected in works:
        case.look("wait", work.wait(), expected)


def _started(case: Case, call: Call) -> None:
    _start(case, call)
    _wait(case, call)


def _by_communicator(case: Case, call: Call, is_into: bool = False) -> None:
    """Reduce by the communicator, into memory of the caller if asked to."""
    array = _array(case, call)
    out = case.memory.array(array.shape, array.dtype) if is_into else None
    result = case.strategies[call.strategy].communicator.all_reduce(call.op, array, out=out)
    case.look("all_reduce", result, case.totals(call.op, array))


def _merge_call(case: Case, call: Call) -> None:
    array = _array(case, call)

    def merge(strategy: Any, value: Any) -> Any:
        return strategy.reduce("sum", value, None)

    result = _run(case, call, lambda context: context.merge_call(merge, (array,)))
    case.look("merge_call", result, case.totals("sum", array))


def _reduce(case: Case, call: Call) -> None:
    array, axis, strategy = _array(case, call), call.place, case.strategies[call.strategy]
    result, expected = strategy.reduce(call.op, strategy.run(lambda: array), axis), case.totals(call.op, array)
    case.look("reduce", result, lambda: expected() if axis is None else expected().sum(axis))


def _gather(case: Case, call: Call) -> None:
    array, strategy = _array(case, call), case.strategies[call.strategy]
    result = strategy.gather(strategy.run(lambda: array), call.place or 0)
    case.look("gather", result, lambda: of_verb("all_gather", _parts(case), call.place or 0, case.rank)[0])


def _move(case: Case, call: Call) -> None:
    """Call the method of a replica context that has the name of the verb, with an array and an axis or a root."""
    array, place = _array(case, call), case.rank if call.place == ITSELF else call.place or 0
    result = _run(case, call, lambda context: getattr(context, call.verb)(array, place))
    case.look(call.verb, result, lambda: of_verb(call.verb, _parts(case), place, case.rank)[0])


def _reduce_scatter(case: Case, call: Call) -> None:
    array, axis = _array(case, call), call.place or 0
    result = _run(case, call, lambda context: context.reduce_scatter(call.op, array, axis, _options(call)))
    expected = case.totals(call.op, array)
    case.look("reduce_scatter", result, lambda: np.array_split(expected(), case.size, axis)[case.rank])


def _all_to_all(case: Case, call: Call) -> None:
    """Send the same array to every rank, or to fewer than there are, by so many."""
    arrays = [_array(case, call)] * (case.size - (call.place or 0))
    case.look("all_to_all", _run(case, call, lambda context: context.all_to_all(arrays)), lambda: _parts(case))


def _variable(case: Case, call: Call) -> None:
    """Make a variable, which holds the value of rank 0."""
    initial = _array(case, call)
    synchronization = VariableSynchronization.ON_READ if call.form == "on_read" else VariableSynchronization.AUTO
    with case.strategies[call.strategy].scope():
        made = mpistrat.Variable(initial, aggregation=VariableAggregation[call.op.upper()], synchronization=synchronization)
    if call.form != "on_read":
        case.look("variable", made.numpy(), lambda: _parts(case)[0])
    case.variables.append(made)


def _assign(case: Case, call: Call, method: str = "assign") -> None:
    variable = case.variables[call.place or 0]
    array, before = case.operand(variable.shape, "float64"), np.array(variable.numpy())
    total = case.totals("sum", array)
    _run(case, call, lambda context: getattr(variable, method)(array))
    case.look(method, variable.numpy(), lambda: total() + (before if method == "assign_add" else 0))


def _drop(case: Case, call: Call) -> None:
    """Forget the last strategy, without closing it."""
    case.kept.clear()
    del case.strategies[-1]
    gc.collect()


def _interrupted(case: Case, call: Call) -> None:
    """Have a signal handler raise while this rank waits in a collective, to which others then come in vain."""

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, _LATE_SECONDS / 3)
    try:
        with suppress(InterruptedError):
            _all_reduce(case, call)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _feed(case: Case, call: Call) -> None:
    """Take steps on so many batches of a generator, which raises or sleeps at a place: every row of every rank counts."""

    def batches() -> Iterator[np.ndarray]:
        for number in range(call.shape[0]):
            if number == call.place and call.form == "sleeps":
                time.sleep(_FOR_EVER)
            if number == call.place:
                raise FileNotFoundError("no such file of rows")
            yield np.full(2, float(number))

    def step(batch: np.ndarray) -> Any:
        return mpistrat.get_replica_context().all_reduce("sum", np.float64(len(batch)))

    strategy, rows = case.strategies[call.strategy], 0
    for batch in strategy.distribute_datasets_from_function(lambda context: batches()):
        rows += int(strategy.local(strategy.run(step, args=(batch,))))
    case.look("rows", np.asarray(rows), lambda: np.asarray(2 * sum(other.shape[0] for other in case.calls)))


def _of_two(case: Case, call: Call) -> None:
    """Make a communicator of the two ranks of a pair, which a call before has made."""
    case.kept.append(mpistrat.Communicator(case.kept[-1]))


def _sleep(case: Case, call: Call) -> None:
    time.sleep(_FOR_EVER)


def _read_pipe(case: Case, call: Call) -> None:
    os.read(os.pipe()[0], 1)


def _stop(case: Case, call: Call) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _lock(case: Case, call: Call) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _barrier_of_mpi(case: Case, call: Call) -> None:
    MPI.COMM_WORLD.Barrier()


def _compute(case: Case, call: Call) -> None:
    end, total = time.monotonic() + _FOR_EVER, 0
    while time.monotonic() < end:
        total += 1


def _raise(case: Case, call: Call) -> None:
    raise ValueError("a rank fails here")


VERBS: dict[str, Callable[[Case, Call], object]] = {
    "all_reduce": _all_reduce,
    "weighted": partial(_all_reduce, weight=1.0),
    "start": _start,
    "wait": _wait,
    "started": _started,
    "into": partial(_by_communicator, is_into=True),
    "of_communicator": _by_communicator,
    "merge_call": _merge_call,
    "merge_nothing": lambda case, call: _run(case, call, lambda context: context.merge_call(lambda strategy: None)),
    "reduce": _reduce,
    "all_gather": _move,
    "gather": _gather,
    "broadcast": _move,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": lambda case, call: _run(case, call, lambda context: context.barrier()),
    "variable": _variable,
    "assign": _assign,
    "assign_add": partial(_assign, method="assign_add"),
    "read": lambda case, call: case.variables[call.place or 0].numpy(),
    "strategy": lambda case, call: case.strategies.append(mpistrat.MultiWorkerMirroredStrategy(None, _options(call))),
    "mirrored": lambda case, call: case.strategies.append(mpistrat.MirroredStrategy()),
    "close": lambda case, call: case.strategies[call.strategy].close(),
    "explain": lambda case, call: case.strategies[call.strategy].explain(np.ones(3)),
    "drop": _drop,
    "feed": _feed,
    "late": lambda case, call: time.sleep(_LATE_SECONDS),
    "pair": lambda case, call: case.kept.append(MPI.COMM_WORLD.Split(case.rank // 2)),
    "of_two": _of_two,
    "sleep": _sleep,
    "compute": _compute,
    "pipe": _read_pipe,
    "stop": _stop,
    "lock": _lock,
    "barrier_of_mpi": _barrier_of_mpi,
    "interrupted": _interrupted,
    "raise": _raise,
    "exit": lambda case, call: sys.exit(3),
    "vanish": lambda case, call: os._exit(7),
}
LOCAL = {"wait", "explain", "drop", "late"}  # in which no other rank takes part
