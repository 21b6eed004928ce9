"""Cases on a strategy: its collectives in a replica context and outside it, and its variables."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import mpistrat
from tests.fuzz.operands import OPS, VERBS, Operand, Operands, told

_MOST_REPEATS = 3
_CROSS_REPLICA = ("reduce", "gather", "batch_reduce")
_WITH_AXIS = ("all_gather", "gather", "reduce_scatter")
_IN_REPLICA = ("all_reduce", "all_reduce", "started", "broadcast", "weighted", "all_to_all", "merge_call")
_LIKE = {"started": "all_reduce", "reduce": "all_reduce", "batch_reduce": "all_reduce", "gather": "all_gather"}
_LIKE |= {"merge_call": "broadcast"}


def make_strategy(rng: np.random.Generator, is_one_node: bool) -> Callable[[], Any]:
    """Return what makes a strategy; on one node it may have cross-device operations of its own. A collective call."""
    packs = int(rng.integers(3))
    kinds = [mpistrat.HierarchicalAllReduce, mpistrat.HierarchicalCopyAllReduce]
    kind, is_mirrored = kinds[rng.integers(len(kinds))], is_one_node and rng.random() < 0.5
    is_plain, options = rng.random() < 0.5, mpistrat.experimental.CommunicationOptions(bytes_per_pack=int(rng.choice([0, 500])))
    if is_mirrored:
        return lambda: mpistrat.MirroredStrategy(cross_device_ops=kind(num_packs=packs))
    return lambda: mpistrat.MultiWorkerMirroredStrategy(communication_options=None if is_plain else options)


def play_strategy(field: Any, rng: np.random.Generator) -> Callable[[], None]:
    strategy, size, rank = field.strategy, field.comm.size, field.comm.rank
    verb = str(rng.choice((*_IN_REPLICA, *_WITH_AXIS, *_CROSS_REPLICA)))
    op = "MEAN" if verb == "weighted" else str(rng.choice(["SUM", "MEAN"] if verb in ("reduce", "batch_reduce") else OPS))
    operands = Operands(rng, op, rank)
    is_list = operands.is_list and verb != "all_to_all"
    if verb in _WITH_AXIS:
        operands[:] = [operand for operand in operands if operand.shape]
    if verb == "weighted":
        operands[:] = [operand for operand in operands if operand.dtype.kind == "f" and not operand.is_huge]
    if verb == "all_to_all":
        del operands[1:]
    options, repeats = field.options(rng, None), int(rng.integers(1, _MOST_REPEATS + 1))
    in_place = bool(rng.random() < 0.3)
    field.note = f"strategy {verb} {op} {operands} {told(options)} x{repeats} in place={in_place}"

    def nest(values: Sequence[Any]) -> Any:
        return {"a": list(values[1:]), "b": values[0]} if is_list else values[0]

    def leaves(value: Any) -> list[Any]:
        return [value["b"], *value["a"]] if is_list else [value]

    def step(value: Any) -> Any:
        context = mpistrat.get_replica_context()
        if verb == "all_reduce":
            is_target = in_place and all(isinstance(leaf, np.ndarray) and leaf.flags.carray for leaf in leaves(value))
            return context.all_reduce(op, value, options, out=value if is_target else None)
        if verb == "started":
            works = [context.start_all_reduce(op, value, options) for _ in range(2)]
            works.pop().wait()
            return works.pop().wait()
        if verb == "merge_call":
            return context.merge_call(lambda s, v: s.broadcast(s.local(v), size - 1, options), args=(value,))
        if verb == "weighted":
            return context.all_reduce(op, value, weight=1.0)
        if verb == "all_to_all":
            return np.stack(context.all_to_all([value] * size, options))
        given = (*[op] * VERBS[verb].reduces, value, size - 1 if verb == "broadcast" else 0, options)
        return getattr(context, verb)(*given)

    def across(value: Any) -> Any:
        per_replica = strategy.run(lambda: value)
        if verb == "reduce":
            return strategy.reduce(op, per_replica, None, options)
        if verb == "gather":
            return strategy.gather(per_replica, 0, options)
        # a number, which one replica has as it is, stands for no replicas
        pairs = [(leaf, leaf if size > 1 or hasattr(leaf, "dtype") else "rank:0") for leaf in leaves(per_replica)]
        return nest(strategy.local(strategy.extended.batch_reduce_to(op, pairs, options)))

    def check_one(operand: Operand, result: Any) -> None:
        parts = [np.asarray(operand.part(each)) for each in range(size)]
        if verb == "all_to_all":
            assert np.asarray(result).tobytes() == np.stack(parts).tobytes()
        elif verb == "weighted":
            wanted = sum(part.astype(np.float64) for part in parts) / size
            assert np.allclose(np.asarray(result, np.float64), wanted, rtol=0.02, atol=0.02), (result, wanted)
        else:
            alike = _LIKE.get(verb, verb)
            operand.check(result, size, alike, size - 1 if alike == "broadcast" else 0, rank)

    def run() -> None:
        for repeat in range(repeats if operands else 0):
            if repeat:
                operands.renew()
            value = nest([operand.array for operand in operands])
            found = across(value) if verb in _CROSS_REPLICA else strategy.local(strategy.run(step, args=(value,)))
            for operand, result in zip(operands, leaves(found), strict=True):
                check_one(operand, result)

    return run


def play_variable(field: Any, rng: np.random.Generator) -> Callable[[], None]:
    """Make a variable, assign to it on all replicas, and drop it."""
    strategy = field.strategy
    kind = str(rng.choice(["SUM", "MEAN", "ONLY_FIRST_REPLICA"]))
    operand = Operand(rng, "MAX" if kind == "ONLY_FIRST_REPLICA" else kind, field.comm.rank)
    if operand.dtype.kind in "iu" and kind == "MEAN":
        kind = operand.op = "SUM"  # a variable of integers holds no mean
        operand.renew()  # sums are of smaller values
    on_read, repeats = bool(rng.random() < 0.3), int(rng.integers(1, _MOST_REPEATS + 1))
    field.note = f"variable {kind} {operand} on_read={on_read} x{repeats}"

    def run() -> None:
        with strategy.scope():
            synchronization = mpistrat.VariableSynchronization.ON_READ if on_read else mpistrat.VariableSynchronization.ON_WRITE
            variable = mpistrat.Variable(
                np.zeros(operand.shape, operand.dtype),
                synchronization=synchronization,
                aggregation=mpistrat.VariableAggregation[kind],
            )
        for repeat in range(repeats):
            if repeat:
                operand.renew()
            strategy.run(lambda: variable.assign(operand.array, read_value=False))
            with strategy.scope():
                found = variable.numpy()
            if kind == "ONLY_FIRST_REPLICA":
                assert found.tobytes() == np.asarray(operand.part(0)).tobytes(), (found, operand.part(0))
            else:
                operand.check(found, field.comm.size)

    return run
