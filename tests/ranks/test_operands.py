"""What verbs take: each kind of value, arrays of PyTorch and JAX too, through each verb of communicators, contexts, strategies.

A value is either reduced and moved as NumPy would do it, or refused by an error of mpistrat on every rank; the communicator
works afterwards in both cases.
"""

import ctypes
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.errors import AgreementError, InvalidArgumentError, MpistratError
from mpistrat.structures import flatten
from tests.gpu.interop import KINDS
from tests.launches import needs_ranks, on_ranks, up_to_ranks
from tests.other_arrays import CUDA, SpeaksDlpack, StandardArray, installed
from tests.ranks.cases import case
from tests.reference import LAYOUTS, of_verb, unaligned

pytestmark = up_to_ranks(3)
REFUSED = "refused"


class Named(np.ndarray):
    """A subclass."""


RECORDS = np.dtype([("x", "f8"), ("y", "i4")])
# by the rank; what is not refused is read as `numpy.asarray` does, or as a nest by contexts and strategies
TAKEN = {
    "matrix": lambda rank: (np.arange(6.0).reshape(2, 3) + rank).view(np.matrix),
    "subclass": lambda rank: (np.arange(5) + rank).view(Named),
    "read-only": lambda rank: LAYOUTS["read-only"](np.arange(4.0) + rank),
    "unaligned": lambda rank: unaligned(np.arange(4.0) + rank),
    "unaligned and large": lambda rank: unaligned(np.arange(100_000.0) + rank),
    "backwards": lambda rank: (np.arange(4.0) + rank)[::-1],
    "Fortran order": lambda rank: np.asfortranarray(np.arange(6, dtype="f4").reshape(3, 2) + rank),
    "no axes": lambda rank: np.array(1.5 + rank),
    "empty": lambda rank: np.empty((0, 3)),
    "numpy scalar": lambda rank: np.float32(rank),
    "int": lambda rank: rank,
    "float": lambda rank: 0.5 + rank,
    "bool": lambda rank: rank == 0,
    "complex": lambda rank: 1j * rank,
    "numbers": lambda rank: [1.5 + rank, 2 * rank],
    "twice": lambda rank: [np.arange(3.0) + rank] * 2,
}
NESTS = {
    "lists in a list": lambda rank: [[1.0, 2.0], [3.0 + rank]],
    "dict": lambda rank: {"a": np.arange(3.0) + rank},
    "None": lambda rank: None,
}
OTHERS = {
    "masked array": lambda rank: np.ma.array([1.0, 2.0], mask=[False, True]),
    "masked array without a mask": lambda rank: np.ma.array([1.0, 2.0]),
    "one masked of two": lambda rank: [np.ones(2), np.ma.array([1.0, 2.0], mask=[False, True])],
    "structured": lambda rank: np.zeros(2, RECORDS),
    "records": lambda rank: np.zeros(2, RECORDS).view(np.recarray),
    "objects": lambda rank: np.array([1, None]),
    "foreign bytes": lambda rank: np.arange(3, dtype=">f8"),
    "dates": lambda rank: np.array(["2020-01-01"], "M8[D]"),
    "str": lambda rank: "text",
    "ragged": lambda rank: [[1.0], [np.ones(2), np.array("x")]],
    "object": lambda rank: object(),
}


# a name, what calls it, and what it is called in `tests.reference`
VERBS = {
    "all_reduce": (lambda c, x: c.all_reduce("sum", x), "all_reduce"),
    "start_all_reduce": (lambda c, x: c.start_all_reduce("sum", x).wait(), "all_reduce"),
    "reduce_scatter": (lambda c, x: c.reduce_scatter("sum", x), "reduce_scatter"),
    "all_gather": (lambda c, x: c.all_gather(x, 0), "all_gather"),
    "broadcast": (lambda c, x: c.broadcast(x), "broadcast"),
}
OF_COMMUNICATORS = {
    "gather": (lambda c, x: c.gather(x, c.size - 1), "gather"),
    "all_to_all": (lambda c, x: c.all_to_all(x), "all_to_all"),
}
OF_STRATEGIES = {
    "reduce": (lambda s, x: s.reduce("sum", x, axis=None), "all_reduce"),
    "gather": (lambda s, x: s.gather(x, 0), "all_gather"),
}


def expect(verb, parts, rank, op="SUM"):
    """Return what a rank has after a verb, or that all refuse these arrays."""
    if not parts[0].ndim and verb in ("reduce_scatter", "all_gather", "all_to_all"):
        return REFUSED
    place = len(parts) - 1 if verb == "gather" else 0
    found, bound = of_verb(verb, parts, place, rank, op if "reduce" in verb else "")
    assert bound is None
    return found


@pytest.fixture
def ops(comm, make_ops):
    return make_ops("2+1" if comm.size == 3 else f"1x{comm.size}")


def _is_equal(found, expected):
    if expected is None or isinstance(expected, list):  # of `gather`
        return found is None if expected is None else all(map(_is_equal, found, expected))
    return type(found) is np.ndarray and found.dtype == expected.dtype and np.array_equal(found, expected)


def _check(call, make, verb, communicator, leaves_of):
    """Check what a verb, or one that refuses, makes of a value, twice: the second time by what it knows."""
    rank, size = communicator.rank, communicator.size
    expected = REFUSED
    if verb is not None:
        leaves = zip(*(map(np.asarray, leaves_of(make(each))) for each in range(size)), strict=True)
        expected = [expect(verb, parts, rank) for parts in leaves]
        expected = REFUSED if any(one is REFUSED for one in expected if isinstance(one, str)) else expected
    for _ in range(2):
        if expected is REFUSED:
            with pytest.raises(MpistratError):
                call()
        else:
            found = leaves_of(call())
            assert len(found) == len(expected)
            assert all(map(_is_equal, found, expected)), (found, expected)
        assert communicator.all_reduce("sum", np.ones(2)).tolist() == [size, size]


def _items(value):
    return value if isinstance(value, list) else [value]


def _cases(verbs, taken):
    """Return each value through each verb: both names, what calls and what makes it, it, and what to expect."""
    for (verb, (call, known)), (name, make) in product(verbs.items(), {**TAKEN, **NESTS, **OTHERS}.items()):
        is_refused = name not in taken or (name == "bool" and "reduce" in verb)
        yield f"{verb} of {name}", call, make, make(0), None if is_refused else known


def test_a_communicator(ops):
    for name, call, make, value, verb in _cases({**VERBS, **OF_COMMUNICATORS}, TAKEN):
        if isinstance(value, list) and name.startswith("all_to_all"):  # one for each rank: tested with it
            continue
        leaves_of = _items if isinstance(value, list) else lambda value: [value]
        with case(name):
            _check(lambda: call(ops, make(ops.rank)), make, verb, ops, leaves_of)  # noqa: B023


def test_a_replica_context_and_a_strategy(strategy):
    communicator = strategy.communicator
    for verbs, is_context in ((VERBS, True), (OF_STRATEGIES, False)):
        for name, call, make, _, verb in _cases(verbs, {**TAKEN, **NESTS}):

            def run():
                value = make(communicator.rank)  # noqa: B023
                if not is_context:  # noqa: B023
                    return call(strategy, strategy.run(lambda: value))  # noqa: B023
                return strategy.local(strategy.run(lambda: call(mpistrat.get_replica_context(), value)))  # noqa: B023

            with case(name):
                _check(run, make, verb, communicator, lambda value: flatten(value)[0])


# verbs with `out`: the call, and the elements of the result of 2 elements for each rank
WITH_OUT = {
    "all_reduce": (lambda c, x, out: c.all_reduce("sum", x, out=out), lambda size: 2 * size),
    "all_reduce mean": (lambda c, x, out: c.all_reduce("mean", x, out=out), lambda size: 2 * size),
    "start_all_reduce": (lambda c, x, out: c.start_all_reduce("sum", x, out=out).wait(), lambda size: 2 * size),
    "reduce_scatter": (lambda c, x, out: c.reduce_scatter("sum", x, out=out), lambda size: 2),
    "all_gather": (lambda c, x, out: c.all_gather(x, out=out), lambda size: 2 * size * size),
    "broadcast": (lambda c, x, out: c.broadcast(x, out=out), lambda size: 2 * size),
}
# of a value and an `out` that would fit, what does not
MISFITS = {
    "read-only": lambda x, out: (x, LAYOUTS["read-only"](out)),
    "unaligned": lambda x, out: (x, unaligned(out)),
    "strided": lambda x, out: (x, np.repeat(out, 2)[::2]),
    "another dtype": lambda x, out: (x, out.astype("f4")),
    "another length": lambda x, out: (x, np.append(out, out)),
    "a masked array": lambda x, out: (x, np.ma.array(out)),
    "objects": lambda x, out: (x, out.astype(object)),
    "a number": lambda x, out: (x, 1.0),
    "a list for an array": lambda x, out: (x, [out]),
    "an array for a list": lambda x, out: ([x], out),
    "None in a list": lambda x, out: ([x], [None]),
    "fewer": lambda x, out: ([x, x], [out]),
    "one twice": lambda x, out: ([x, x], [out, out]),
    "overlapping": lambda x, out: ([x, x], [(both := np.zeros(out.size + 1))[1:], both[:-1]]),
    "the same memory": lambda x, out: ([x, x], [out, out[:]]),
}


def test_results_may_be_written_over_what_is_yet_to_be_sent(ops):
    length = 2 * ops.size
    parts = [np.arange(length) + 10.0 * rank for rank in range(ops.size)]
    doubled = [2 * part for part in parts]
    for (name, (call, count)), _ in product(WITH_OUT.items(), range(3)):
        verb, op = name.removeprefix("start_").split()[0], "MEAN" if name.endswith("mean") else "SUM"
        memory = np.zeros(count(ops.size) + length + 1)
        x, out = memory[1 : length + 1], memory[: count(ops.size)]
        x[:] = parts[ops.rank]
        assert call(ops, x, out) is out
        assert out.tolist() == expect(verb, parts, ops.rank, op).tolist()
        x[:] = doubled[ops.rank]
        found = call(ops, [parts[ops.rank], x], [out, other := np.empty(out.size).view(Named)])
        assert found[0] is out
        assert found[1] is other
        assert out.tolist() == expect(verb, parts, ops.rank, op).tolist()
        assert other.tolist() == expect(verb, doubled, ops.rank, op).tolist()


def without_base(memory, start, count):
    """Return an array on some elements of another, as C extensions make it: it has no base, and does not own its memory."""
    find = ctypes.pythonapi.PyCapsule_GetPointer
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(find(np._core._multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    kinds = (ctypes.py_object, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t), ctypes.c_int, *[ctypes.c_void_p] * 2)
    new = ctypes.PYFUNCTYPE(ctypes.py_object, *kinds, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(table[93])  # PyArray_New
    address = memory.ctypes.data + start * memory.itemsize
    return new(np.ndarray, 1, (ctypes.c_ssize_t * 1)(count), memory.dtype.num, None, address, 0, 0x501, None)


def a_view(memory, start, count):
    return memory[start : start + count]


def test_overlapping_arrays_are_reduced_as_if_they_were_apart_and_results_refused(ops):
    ops.is_strict = False
    for cut, count in product((without_base, a_view), (3, 1000, 100_000, 600_000)):
        memory = np.empty(3 * count)
        first, second, third = (cut(memory, start, count) for start in (0, 1, 2 * count))
        assert (first.base is None) == (cut is without_base)
        filled = np.arange(memory.size) % 97
        each_twice = [([first], [second]), ([first, third], [third, second])] * 2
        for op, (sources, targets) in product(("sum", "mean"), each_twice):
            memory[:] = filled
            wanted = [source * (ops.size if op == "sum" else 1) for source in sources]
            ops.all_reduce(op, sources, out=targets)
            for target, total in zip(targets, wanted, strict=True):
                np.testing.assert_array_equal(target, total, err_msg=f"{cut} {count}")
    ops.is_strict = False
    pair, memory = [np.ones(40_000), np.ones(40_000)], np.zeros(60_000)
    for _ in range(2):
        assert ops.all_reduce("sum", pair, out=[array.copy() for array in pair])[1][0] == ops.size
    with pytest.raises(MpistratError, match="overlap"):
        ops.all_reduce("sum", pair, out=[memory[:40_000], memory[20_000:]])
    results = [array.copy() for array in pair]
    with pytest.raises(MpistratError, match="got 3"):
        ops.all_reduce("sum", pair, out=[results[0], *results])
    for count in (1, 2):  # the rows of an array are none of its list
        ops.all_reduce("sum", pair[:count])
        with pytest.raises(MpistratError, match="one array for each of the . that are passed; got ndarray"):
            ops.all_reduce("sum", pair[:count], out=np.zeros((count, 40_000)))
    assert ops.all_reduce("sum", np.ones(2)).tolist() == [ops.size] * 2


def test_an_out_that_does_not_fit_is_refused_on_every_rank(ops):
    for (verb, (call, count)), (name, misfit) in product(WITH_OUT.items(), MISFITS.items()):
        for rank in {0, ops.size - 1, None}:
            x, out = np.ones(2 * ops.size), np.zeros(count(ops.size))
            is_wrong = rank in (None, ops.rank)
            given, target = misfit(x, out) if is_wrong else (x, out)
            if not is_wrong and isinstance(misfit(x, out)[0], list):
                given, target = [x], [out]
            with case(f"{verb}, {name}"):
                with pytest.raises(MpistratError):
                    call(ops, given, target)
                ops.barrier()
                assert ops.all_reduce("sum", np.ones(2)).tolist() == [ops.size] * 2


two_ranks = on_ranks(2)  # these libraries are heavy to start, and other numbers of ranks would tell nothing new
# why on the CPU is told where no test before has bound a device
_ELSEWHERE = r"value\['w'\] is on cuda:0, this replica computes on /cpu:0( \(.*\))?; copy it to host memory first"


@pytest.fixture(params=KINDS)
def kind(request):
    installed(request.param)
    return KINDS[request.param]("cpu")


def _bfloat16(kind, values):
    return kind.make(np.array(values, ml_dtypes.bfloat16))


def _elements(kind, value, dtype="float32"):
    """Return the elements of what must be an array of this library and this dtype."""
    found = kind.read(value)
    assert found.dtype.name == dtype
    return found.tolist()


def _run(strategy, step):
    """Return what `step`, given its replica context, returned on this rank."""
    return strategy.experimental_local_results(strategy.run(lambda: step(mpistrat.get_replica_context())))[0]


@two_ranks
def test_all_reduce_of_a_nest_of_all_kinds(kind, comm, strategy):
    def step(context):
        nest = {
            "mine": [kind.make(np.ones(2, np.float32)), kind.make(np.array(3, np.int32)), _bfloat16(kind, [0.5])],
            "numpy": (np.arange(3), np.float16(1), 2.5, None),
            "others": [StandardArray(np.ones(2)), SpeaksDlpack(np.ones(2)), memoryview(b"\x01")],
        }
        return context.all_reduce("sum", nest)

    total = _run(strategy, step)
    assert _elements(kind, total["mine"][0]) == [comm.size] * 2
    assert _elements(kind, total["mine"][1], "int32") == 3 * comm.size
    assert _elements(kind, total["mine"][2], "bfloat16") == [comm.size / 2]
    plain = [*total["numpy"][:3], *total["others"][1:]]
    assert {type(array) for array in plain} == {np.ndarray}
    assert [array.dtype.name for array in plain] == ["int64", "float16", "float64", "float64", "uint8"]
    assert [array.tolist() for array in plain[:3]] == [[0, comm.size, 2 * comm.size], comm.size, 2.5 * comm.size]
    assert total["numpy"][3] is None
    assert type(total["others"][0]) is StandardArray
    assert total["others"][0].numpy().tolist() == [comm.size] * 2


@two_ranks
def test_a_result_is_nobody_elses_also_in_cross_replica_context(kind, comm, strategy):
    for count in (1, 1_000, 100_000):
        given = [[kind.make(np.full(count, value, np.float32)) for _ in range(2)] for value in (1, 2)]
        found = _run(strategy, lambda context, given=given: [context.all_reduce("sum", arrays) for arrays in given])
        for results, value in zip(found, (1, 2), strict=True):
            for result in results:
                assert set(_elements(kind, result)) == {value * comm.size}
    value = strategy.run(lambda: [kind.make(np.full((comm.rank + 1, 2), comm.rank, np.float32)), np.ones(1)])
    rows = [rank for rank in range(comm.size) for _ in range(rank + 1)]
    mean, count = strategy.reduce("mean", value, axis=0)
    assert _elements(kind, mean) == [pytest.approx(sum(rows) / len(rows))] * 2
    assert (type(count), count) == (np.ndarray, 1)
    assert _elements(kind, strategy.gather(value[0], axis=0)) == [[row] * 2 for row in rows]


@two_ranks
def test_variables(kind, comm, strategy):
    with strategy.scope():
        value = kind.make(np.full(3, comm.rank + 1, np.float32))
        variable = mpistrat.Variable(value, aggregation=mpistrat.VariableAggregation.MEAN)
        half = mpistrat.Variable(_bfloat16(kind, [1, 2]))
        variable.assign_add(kind.make(np.ones(3, np.float32)))
    assert (half.dtype.name, half.numpy().tolist()) == ("bfloat16", [1, 2])
    assert variable.numpy().tolist() == [2] * 3

    def step(context):
        variable.assign(kind.make(np.full(3, 2 * comm.rank, np.float32)))
        gradient = context.all_reduce("sum", kind.make(np.ones(3, np.float32)))
        context.update(variable, lambda array, gradient: kind.make(array) - gradient, (gradient,))

    _run(strategy, step)
    assert comm.allgather(variable.numpy().tolist()) == [[comm.size - 1.0 - comm.size] * 3] * comm.size


@two_ranks
def test_arrays_that_cannot_be_written_are_refused_as_targets(kind, strategy):
    value, numbers = kind.make(np.ones(2, np.float32)), [kind.make(np.ones(2, np.float32)), np.ones(2)]
    tensor, plain = strategy.communicator.all_reduce("sum", numbers)
    assert (_elements(kind, tensor), type(plain)) == ([2, 2], np.ndarray)
    if not kind.can_be_written:
        with pytest.raises(InvalidArgumentError, match="out must be an array to write to"):
            strategy.communicator.all_reduce("sum", value, out=value)


@needs_ranks(2)
def test_an_array_on_another_device_on_one_rank_is_refused_on_all(comm, strategy):
    is_elsewhere = comm.rank == comm.size - 1  # this needs neither library
    value = SpeaksDlpack(np.ones(2), CUDA) if is_elsewhere else np.ones(2)
    error, message = (InvalidArgumentError, _ELSEWHERE) if is_elsewhere else (AgreementError, _ELSEWHERE)
    with pytest.raises(error, match=message):
        _run(strategy, lambda context: context.all_reduce("sum", {"w": value}))
    assert comm.allreduce(1) == comm.size
