"""CrossDeviceOps: what they are asked for and refuse, which implementation sees it, and where results land."""

import numpy as np
import pytest

import mpistrat
from mpistrat import CollectiveAllReduce, CrossDeviceOps, HierarchicalAllReduce, NcclAllReduce, ReductionToOneDevice
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.cross_device import HierarchicalCopyAllReduce, OnSomeReplicas, resolve
from mpistrat.errors import InvalidArgumentError, TransportError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp
from mpistrat.topology.world import World
from tests.other_arrays import StandardArray
from tests.unit.replicas import on_replicas

FAMILY = [HierarchicalAllReduce, CollectiveAllReduce, HierarchicalCopyAllReduce, ReductionToOneDevice]


def in_scope(num_replicas, program):
    """Return what ``program(rank)`` returns on each replica, in the scope of a strategy of so many."""

    def scoped(strategy):
        with strategy.scope():
            return program(strategy.extended.communicator.rank)

    return on_replicas(num_replicas, scoped)


def one_replica():
    return mpistrat.Strategy(mpistrat.StrategyExtended(LocalCommunicator()))


def plain(value):
    """Return what this rank can read of a result, as lists."""
    if isinstance(value, OnSomeReplicas) and not value.is_here:
        return None
    return np.asarray(value).tolist()


def test_a_value_that_is_elsewhere_says_where_and_is_moved():
    def program(rank):
        value = PerReplica(np.array([rank]))
        total = HierarchicalAllReduce().reduce("sum", value, "rank:1")
        seen = [repr(total), len(total.values), total.in_replica() is total]
        if rank != 1:
            with pytest.raises(InvalidArgumentError, match=r"rank [02]: this value was reduced to rank 1 and cannot be read"):
                np.asarray(total)
        return seen

    held = ["OnSomeReplicas(array([3]), on rank 1)", 1, False]
    absent = ["OnSomeReplicas(not here, on rank 1)", 0, True]
    assert in_scope(3, program) == [absent, held, absent]

    def program(rank):
        ops, value = HierarchicalAllReduce(), PerReplica(np.array([rank + 1]))
        total = ops.reduce("sum", value, "rank:1")
        rows = ops.reduce("sum", PerReplica(IndexedSlices([1.0], [rank], (3,))), "rank:1")
        assert ops.reduce("mean", total, total) is total
        moved = [ops.reduce("sum", total, 2), ops.broadcast(total, value), ops.broadcast(rows, {0, 1})]
        return [plain(result) for result in (*moved, ops.reduce("sum", total, value))]

    assert in_scope(3, program) == [[None, [6], [1, 1, 1], [6]], [None, [6], [1, 1, 1], [6]], [[6], [6], None, [6]]]


def test_a_value_that_is_not_distributed():
    def program(rank):
        ops, mirrored, zero = HierarchicalAllReduce(), Mirrored(np.array([5.0])), np.zeros(2)
        assert ops.reduce("mean", mirrored, mirrored) is mirrored
        assert plain(ops.reduce("mean", 5, "/cpu:0")) == 5
        assert [plain(ops.reduce(op, zero, zero)) for op in ReduceOp] == [[0, 0]] * 5
        # each rank passes its own: the result is equal on all destinations
        assert [plain(ops.reduce(op, float(rank), {0, 1})) for op in ("mean", "min", "max")] == [0.5, 0, 1]
        assert plain(ops.reduce("mean", 2.0 * rank, 0)) == (None if rank else 1)
        for value in (mirrored, 5.0, [1, 2], IndexedSlices([1.0], [0], (1,))):
            with pytest.raises(InvalidArgumentError, match="SUM of a value that .* is ambiguous with 2 replicas: it could"):
                ops.reduce("sum", value, "/cpu:0")
        with pytest.raises(InvalidArgumentError, match="PROD of a value that .* is ambiguous with 2 replicas"):
            ops.reduce("prod", 5, "/cpu:0")

    in_scope(2, program)


@pytest.mark.parametrize("family", FAMILY)
def test_the_kind_of_array_that_came_in_comes_out(family):
    def program(rank):
        ops, array = family(), StandardArray(np.array([rank + 1.0]))
        value = PerReplica(array)
        whole = ops.gather_implementation(value, value, 0, None)
        results = [ops.reduce("sum", value, value), ops.broadcast(array, value), whole, ops.reduce("mean", value, 1)]
        components = [result.values[0] for result in results if result.values]
        assert [type(component) for component in components] == [StandardArray] * (3 + rank)
        return [component.numpy().tolist() for component in components]

    assert in_scope(2, program) == [[[3], [1], [1, 2]], [[3], [1], [1, 2], [1.5]]]


def test_outside_all_scopes_there_is_one_replica():
    for family in [*FAMILY, NcclAllReduce]:
        ops, array, rows = family(), np.array([1.0, 2.0]), IndexedSlices([1.0, 1.0], [0, 0])
        assert ops.reduce("sum", array, array) is array
        assert ops.reduce("mean", array, "rank:0") is array
        assert ops.batch_reduce("sum", [(rows, array), (3, 0)]) == [rows, 3]
        assert ops.batch_reduce("sum", []) == []
        assert ops.batch_reduce("sum", ((float(value), "/cpu:0") for value in range(3))) == [0, 1, 2]
        copy = ops.broadcast(array, "/cpu:0")
        assert type(copy) is np.ndarray
        assert copy.tolist() == [1, 2]
    with pytest.raises(InvalidArgumentError, match="'rank:1' does not exist: there is no rank 1; accepted are .* rank:0"):
        HierarchicalAllReduce().reduce("sum", 1.0, "rank:1")


@pytest.mark.parametrize(
    ("destinations", "message"),
    [
        (None, "destinations cannot be None; accepted are a distributed value, variable or array"),
        (["rank:0"], r"destinations cannot be \['rank:0'\]: pass a set to name several ranks; accepted"),
        (1.5, r"destinations cannot be 1\.5; accepted"),
        (True, "destinations cannot be True; accepted"),
        ({"rank:0": 1}, "destinations cannot be {'rank:0': 1}; accepted"),
        ("", "destinations must not be empty; accepted"),
        (set(), "destinations must not be empty; accepted"),
        ({None}, "destinations cannot be None"),
        ("root", "'root' is not a device name; accepted are /cpu:0"),
        ("rank:5", "'rank:5' does not exist: there is no rank 5"),
        (5, "there is no rank 5"),
    ],
)
def test_destinations_that_name_no_rank(destinations, message):
    ops, array = HierarchicalAllReduce(), np.ones(1)
    for call in (
        lambda: ops.reduce("sum", array, destinations),
        lambda: ops.batch_reduce("sum", [(array, array), (array, destinations)]),
        lambda: ops.broadcast(array, destinations),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            call()


def test_destinations_are_sorted_ranks():
    communicator = LocalCommunicator()
    communicator.world, communicator.size = World.from_shape("2x2"), 4
    assert resolve({"rank:3", 0, np.int32(3)}, communicator) == (0, 3)
    assert resolve(1, communicator) == resolve(np.int64(1), communicator) == (1,)
    for everywhere in ({"/cpu:0"}, np.empty(0), PerReplica(1.0), mpistrat.Variable(np.zeros(7))):
        assert resolve(everywhere, communicator) == (0, 1, 2, 3)
    assert resolve(OnSomeReplicas(np.ones(1), (1, 2), 0), communicator) == (1, 2)


NO_ARRAY = "cannot be reduced as a per-replica value: .*for nested values use batch_reduce"
NO_PAIRS = r"value_destination_pairs must be 2-tuples \(value, destinations\); got"
REFUSED = [
    *(
        (call, InvalidArgumentError, NO_ARRAY)
        for value in ("text", None, object(), {"a": 1}, [[1], [1, 2]])
        for call in (
            lambda ops, value=value: ops.reduce("sum", value, "/cpu:0"),
            lambda ops, value=value: ReductionToOneDevice().batch_reduce("mean", [(1.0, 0), (value, 0)]),
            lambda ops, value=value: ops.broadcast(value, "/cpu:0"),
            lambda ops, value=value: in_own_scope(lambda: ops.reduce("sum", PerReplica(value), "/cpu:0")),
        )
    ),
    *(
        (lambda ops, pairs=pairs: ops.batch_reduce("sum", pairs), InvalidArgumentError, NO_PAIRS)
        for pairs in (None, 5, np.ones(2), [(1.0,)], [(1.0, 0, 0)], [[1.0, 0]], ["ab"], "ab")
    ),
    (lambda ops: ops.reduce("median", 1.0, 0), InvalidArgumentError, "unknown reduce_op 'median'"),
    (lambda ops: ops.batch_reduce(7, [(1.0, 0)]), TypeError, "reduce_op must be a ReduceOp or a str"),
    (lambda ops: ops.reduce("sum", 1.0, 0, {"timeout": 3}), InvalidArgumentError, "options must be Comm.*; got {'timeout"),
    (lambda ops: ops.reduce("mean", np.ones(1, bool), 0), UnsupportedDtypeError, "MEAN is not defined for value of dtype bool"),
    (lambda ops: ops.reduce("max", IndexedSlices([1.0], [0]), 0), NotImplementedError, "MAX of Indexed.*is not supported"),
    (
        lambda ops: in_own_scope(lambda: ops.broadcast(PerReplica(1.0), 0)),
        InvalidArgumentError,
        r"PerReplica\(1.0\) has a component on each replica, so it is ambiguous which one",
    ),
]


def in_own_scope(call):
    with one_replica().scope():
        return call()


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_no_value_no_pair_or_not_defined_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(HierarchicalAllReduce())


def test_the_value_of_a_strategy_is_not_combined_outside_its_scope():
    # outside all scopes there is one replica: its component alone would be a wrong sum
    strategy, ops = one_replica(), HierarchicalAllReduce()
    with strategy.scope():
        variable = mpistrat.Variable([1.0])
        assert ops.reduce("sum", variable, 0).tolist() == [1]
    message = r"CrossDeviceOps on .* must be called in the scope of the strategy that .* outside all scopes\.\n    incorrect: "
    for value in (PerReplica(1.0), Mirrored(1.0), OnSomeReplicas(1.0, (0,), 0), variable):
        for call in (lambda value=value: ops.reduce("sum", value, 0), lambda value=value: ops.broadcast(value, 0)):
            with pytest.raises(RuntimeError, match=message):
                call()
    own = mpistrat.Variable([1.0])
    assert ops.reduce("sum", own, own).tolist() == [1]


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_a_result_does_not_change_with_the_variable_that_was_reduced(synchronization, family, num_replicas):
    def program(rank):
        extended, ops = mpistrat.get_strategy().extended, family()
        mean, kind = mpistrat.VariableAggregation.MEAN, mpistrat.VariableSynchronization[synchronization]
        variable = mpistrat.Variable([1.0, 2.0], synchronization=kind, aggregation=mean)
        results = [
            ops.reduce("mean", variable, variable),
            *ops.batch_reduce("max", [(variable, variable), (variable, {*range(num_replicas)})]),
            ops.broadcast(variable, variable) if synchronization == "ON_WRITE" else ops.reduce("mean", variable, variable),
            extended.reduce_to("mean", variable, variable),
            extended.read_var(variable),
        ]
        assert not any(isinstance(result, mpistrat.Variable) for result in results)
        variable.assign([7.0, 7.0])
        return [np.asarray(result).tolist() for result in results]

    assert in_scope(num_replicas, program) == [[[1, 2]] * 6] * num_replicas


def test_they_belong_to_the_cross_replica_context():
    def program(strategy):
        ops = HierarchicalAllReduce()
        calls = {"reduce": ("sum", 1.0, 0), "batch_reduce": ("sum", [(1.0, 0)]), "broadcast": (1.0, 0)}
        for name, arguments in calls.items():
            message = (
                rf"HierarchicalAllReduce.{name} must be called in cross-replica context, but this is inside strategy.run of .*"
                rf"\n    incorrect:  def step\(\): return ops.{name}\(.*\n    correct:    .*"
            )
            with pytest.raises(RuntimeError, match=message):
                strategy.run(getattr(ops, name), arguments)
        merged = strategy.run(lambda: mpistrat.get_replica_context().merge_call(lambda _: ops.reduce("mean", 3.0, {0, 1})))
        return merged.values[0]

    assert on_replicas(2, program) == [3, 3]


def test_ops_reduce_with_options_of_their_own_and_print_what_they_were_made_with():
    seen = []

    class Watched(LocalCommunicator):
        def all_reduce(self, op, arrays, options=None, out=None):
            seen.append((options.num_packs, options.algorithm, options.bytes_per_pack))
            return super().all_reduce(op, arrays, options, out)

    strategy = mpistrat.Strategy(mpistrat.StrategyExtended(Watched()))
    small = CommunicationOptions(bytes_per_pack=9)
    for ops, packs, algorithm in (
        (HierarchicalAllReduce(), None, None),
        (HierarchicalAllReduce(0), 0, None),
        (HierarchicalCopyAllReduce(), 1, "hierarchical"),
        (CollectiveAllReduce(), None, "flat"),
        (CollectiveAllReduce(CommunicationOptions(bytes_per_pack=3), num_packs=2), 2, "flat"),
        (CollectiveAllReduce(CommunicationOptions(algorithm="hierarchical")), None, "hierarchical"),
    ):
        strategy.run(lambda ops=ops: ops.all_reduce_in_replica(ReduceOp.SUM, [np.ones(2)], small))
        assert seen.pop() == (packs, algorithm, 9)
    for kind in (HierarchicalAllReduce, HierarchicalCopyAllReduce, NcclAllReduce):
        assert repr(kind(num_packs=2)) == f"{kind.__name__}(num_packs=2)"
    assert "accumulation_fn=sum)" in repr(ReductionToOneDevice(accumulation_fn=sum))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CollectiveAllReduce(3), InvalidArgumentError, "options must be CommunicationOptions or None; got 3"),
        *(
            (lambda kind=kind: kind(num_packs=-1), InvalidArgumentError, r"None, 0 \(each array by itself\) or pos.*; got -1")
            for kind in (HierarchicalAllReduce, HierarchicalCopyAllReduce, NcclAllReduce)
        ),
        (lambda: ReductionToOneDevice(accumulation_fn="sum"), TypeError, "accumulation_fn must be callable .*; got 'sum'"),
        (lambda: ReductionToOneDevice("/cpu:0"), InvalidArgumentError, "reduce_to_device must name one rank; '/cpu:0' names"),
        (lambda: ReductionToOneDevice(9), InvalidArgumentError, "there is no rank 9"),
        (NcclAllReduce, TransportError, r"arrays in GPU memory, .*: use HierarchicalAllReduce\(\), the default, or Red"),
        (type("Nothing", (CrossDeviceOps,), {}), NotImplementedError, "^Nothing .* no reduction: .* HierarchicalAllReduce$"),
    ],
)
def test_ops_that_cannot_reduce_say_why(make, error, message):
    def program(rank):
        with pytest.raises(error, match=message):
            make().reduce("sum", PerReplica(1.0), 0)

    in_scope(2, program)


class Watched(CrossDeviceOps):
    """Notes the operations that an implementation is asked for, and how many values each has."""

    def __init__(self):
        super().__init__()
        self.seen = []


class ByOne(Watched):
    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        assert isinstance(options, CommunicationOptions)
        assert mpistrat.in_cross_replica_context() or not mpistrat.has_strategy()
        self.seen.append((reduce_op.name, 1))
        communicator = mpistrat.get_strategy().extended.communicator
        return Mirrored(communicator.all_reduce(reduce_op, [np.asarray(per_replica_value.values[0])])[0])


class InBatches(Watched):
    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.seen.append((reduce_op.name, len(value_destination_pairs)))
        communicator = mpistrat.get_strategy().extended.communicator
        # bare arrays will do
        return communicator.all_reduce(reduce_op, [np.asarray(value.values[0]) for value, _ in value_destination_pairs])


class StockByOne(Watched, HierarchicalAllReduce):
    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.seen.append((reduce_op.name, 1))
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)


class StockInBatches(Watched, ReductionToOneDevice):
    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.seen.append((reduce_op.name, len(value_destination_pairs)))
        return [self.reduce_implementation(reduce_op, *pair, options) for pair in value_destination_pairs]


class Both(StockByOne):
    def reduce_implementation(self, *args):
        return super().reduce_implementation(*args)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.seen.append((reduce_op.name, len(value_destination_pairs)))
        return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)


@pytest.mark.parametrize("family", [ByOne, StockByOne, type("Derived", (StockByOne,), {}), InBatches, StockInBatches, Both])
def test_what_a_subclass_overrides_sees_every_reduction(family):
    batch = [("SUM", 3)] if family in (InBatches, StockInBatches, Both) else [("SUM", 1)] * 3

    def program(strategy):
        ops, rank = family(), strategy.rank
        strategy = mpistrat.Strategy(mpistrat.StrategyExtended(strategy.communicator, ops))
        with strategy.scope():
            value = PerReplica(np.array([rank]))
            results = [ops.reduce("max", value, value), *ops.batch_reduce("sum", [(value, value)] * 3)]
        arrays = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", [np.array(rank)] * 3))
        assert all(type(array.values[0]) is np.ndarray for array in arrays)
        return ops.seen, [plain(result) for result in results], [array.values[0].tolist() for array in arrays]

    assert on_replicas(3, program) == [([("MAX", 1), *batch, *batch], [[2], [3], [3], [3]], [3, 3, 3])] * 3


def test_an_accumulation_function_takes_the_place_of_summing_in_replica_order():
    def program(rank):
        calls = []

        def accumulate(parts):
            calls.append([(part.tolist(), part.dtype.name) for part in parts])
            return parts[0] - parts[1]

        ops = ReductionToOneDevice(reduce_to_device="rank:1", accumulation_fn=accumulate)
        value = PerReplica(np.array([7 * (rank + 1)], np.float16))
        results = ops.batch_reduce("mean", [(value, value), (value, 0), (value, "rank:1")])
        assert calls == ([[([7], "float32"), ([14], "float32")]] * 3 if rank == 1 else [])
        return [plain(result) for result in results]

    assert in_scope(2, program) == [[[-3.5], [-3.5], None], [[-3.5], None, [-3.5]]]
    # in any other order a float64 gives another sum
    parts = [1.0, 1e16, -1e16, 3.0]

    def program(rank):
        value = PerReplica(np.array(parts[rank]))
        return plain(ReductionToOneDevice().reduce("sum", value, value))

    assert in_scope(4, program) == [3.0] * 4


@pytest.mark.parametrize(
    ("function", "op", "message"),
    [
        (lambda parts: parts[0][:0], ReduceOp.SUM, r"has shape \(2,\); a value of shape \(0,\)"),
        (lambda parts: "text", ReduceOp.SUM, "what accumulation_fn returned has dtype <U4"),
        (lambda parts: parts[0] * 1j, ReduceOp.MEAN, "has dtype float64, which cannot hold a value of dtype complex128"),
        (sum, ReduceOp.MAX, "accumulation_fn replaces the sum, so it is for SUM and MEAN only; got MAX"),
    ],
)
def test_what_an_accumulation_function_returns_is_checked(function, op, message):
    with pytest.raises((InvalidArgumentError, UnsupportedDtypeError), match=message):
        ReductionToOneDevice(accumulation_fn=function).all_reduce_in_replica(op, [np.ones(2)])
