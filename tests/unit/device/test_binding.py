"""Strategies of one replica on a GPU: variables, values and collectives, on a stand-in device."""

import copy
from functools import partial

import numpy as np
import pytest

import mpistrat
from mpistrat.device import cuda
from mpistrat.errors import InvalidArgumentError, LaunchError, UnsupportedDtypeError
from mpistrat.launch import bootstrap
from tests.gpu.stand_in_arrays import stand_in_gpu
from tests.variable_matrix import made


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("mpistrat.context.stack._default", None)  # the default strategy knows its device
    with stand_in_gpu(7) as device:
        yield device


@pytest.fixture
def xp(gpu):
    return gpu.array_module


@pytest.fixture(params=["default", "one device"])
def strategy(gpu, request):
    return mpistrat.get_strategy() if request.param == "default" else mpistrat.OneDeviceStrategy("/gpu:0")


def test_devices_are_named_by_what_ranks_drive(gpu):
    strategy = mpistrat.OneDeviceStrategy()
    assert strategy.extended.worker_devices == strategy.extended.parameter_devices == ("/gpu:0",)
    assert strategy.extended.replica_device == "/gpu:0"
    message = (
        r"^device '/cpu:0' does not exist: ranks compute on GPUs here, unless MPISTRAT_DEVICE=cpu; accepted are /gpu:0 "
        r"\(each rank's own\) and rank:0$"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        mpistrat.OneDeviceStrategy("/cpu:0")


def test_one_device_binds_the_gpu_and_says_why_it_cannot(monkeypatch):
    monkeypatch.setenv("MPISTRAT_DEVICE", "gpu")
    monkeypatch.setattr(cuda, "count_visible", lambda: (0, "planted: no GPU"))
    monkeypatch.setattr(bootstrap, "_bound", None)
    with pytest.raises(LaunchError, match="^MPISTRAT_DEVICE=gpu was set, but planted: no GPU. Set MPISTRAT_DEVICE=cpu"):
        mpistrat.OneDeviceStrategy()
    assert mpistrat.OneDeviceStrategy("/cpu:0").extended.worker_devices == ("/cpu:0",)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_variable_is_on_the_gpu_wherever_its_values_come_from(strategy, xp, on_gpu):
    put = xp.asarray if on_gpu else np.asarray
    variable = made(strategy, lambda: put(np.arange(3)), dtype=np.float32, shape=(3,))
    assert isinstance(variable.value, xp.ndarray)
    assert (variable.dtype, variable.shape) == (np.float32, (3,))
    variable.assign(put(np.full(3, 5.0)))
    variable.assign_add(put(np.arange(3.0)))
    variable.assign_sub(put(np.ones(3)))
    assert type(variable.numpy()) is np.ndarray
    assert variable.numpy().tolist() == [4, 5, 6]
    copied = copy.deepcopy(variable)
    variable.assign(put(np.zeros(3)))
    assert isinstance(copied.value, xp.ndarray)
    assert copied.value.tolist() == [4, 5, 6]
    with pytest.raises(UnsupportedDtypeError, match="cannot hold a value of dtype"):
        variable.assign(put(np.ones(3, np.complex64)))
    with pytest.raises(InvalidArgumentError, match=r"a value of shape \(2,\) cannot be assigned"):
        variable.assign(put(np.ones(2)))


def test_a_variable_keeps_no_array_of_the_user_and_may_be_a_number(strategy, xp):
    given = xp.zeros(3)
    variable = made(strategy, given)
    given[...] = 7
    assert variable.numpy().tolist() == [0, 0, 0]
    variable.assign(given)
    given[...] = 8
    assert variable.numpy().tolist() == [7, 7, 7]
    steps = made(strategy, 0)
    for _ in range(3):
        steps.assign_add(1)
    assert isinstance(steps.value, xp.ndarray)
    assert (int(steps), [5, 6, 7, 8][steps], f"{steps.value}") == (3, 8, "3")


@pytest.mark.parametrize("method", [f"scatter_{kind}" for kind in ("add", "sub", "mul", "div", "min", "max", "update")])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_scatter_updates_do_on_the_gpu_what_they_do_on_the_host(strategy, xp, method, on_gpu):
    start, rows, indices = np.arange(8.0).reshape(4, 2), np.array([[2.0, 3.0], [4, 5], [6, 1]]), np.array([1, 3, 1])
    put = xp.asarray if on_gpu else np.asarray
    variable = made(strategy, start)
    getattr(variable, method)(mpistrat.IndexedSlices(put(rows), put(indices)))
    expected = start.copy()
    if method == "scatter_update":
        expected[indices] = rows
    else:
        names = {"sub": "subtract", "mul": "multiply", "div": "divide", "min": "minimum", "max": "maximum"}
        kind = method.removeprefix("scatter_")
        getattr(np, names.get(kind, kind)).at(expected, indices, rows)
    assert isinstance(variable.value, xp.ndarray)
    np.testing.assert_array_equal(variable.numpy(), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, bool, np.complex64])
@pytest.mark.parametrize("axis", [None, 0, (0, 1), ()])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_gives_what_it_gives_on_the_host(strategy, xp, op, axis, dtype):
    host = (np.arange(12).reshape(3, 4) % 3).astype(dtype)
    if dtype is bool and axis is None:
        return  # booleans have neither across replicas
    found = strategy.reduce(op, xp.asarray(host), axis=axis)
    expected = _reduced_on_the_host(op, host, axis)
    assert isinstance(found, xp.ndarray)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.get(), expected)


def _reduced_on_the_host(op, host, axis):
    from mpistrat.device.binding import bind, bound_device

    device = bound_device()
    bind(None)
    try:
        return mpistrat.OneDeviceStrategy().reduce(op, host, axis=axis)
    finally:
        bind(device)


@pytest.mark.parametrize(
    "verb",
    [
        lambda context, value: context.all_reduce("sum", value),
        lambda context, value: context.start_all_reduce("sum", value).wait(),
        lambda context, value: context.all_gather(value, 0),
        lambda context, value: context.broadcast(value),
        lambda context, value: context.reduce_scatter("sum", value),
        lambda context, value: {"w": context.all_to_all([value["w"]])[0]},
    ],
)
def test_every_verb_takes_arrays_of_the_gpu_and_refuses_those_of_the_host(strategy, xp, verb):
    run = partial(strategy.run, lambda value: verb(mpistrat.get_replica_context(), value))
    array = xp.asarray(np.arange(3.0))
    found = run(args=({"w": array},))["w"]
    assert isinstance(found, xp.ndarray)
    assert found.tolist() == [0, 1, 2]
    array[...] = 9
    assert found.tolist() == [0, 1, 2], "a result is a copy"
    message = r"^value(s\[0\]|\['w'\]) is in host memory, this replica computes on /gpu:0; copy it first, strategy\.array_"
    with pytest.raises(InvalidArgumentError, match=message):
        run(args=({"w": np.arange(3.0)},))


def test_results_go_where_they_are_wanted(strategy, xp):
    communicator, both = strategy.extended.communicator, xp.asarray(np.arange(6.0))
    found = communicator.all_reduce(mpistrat.ReduceOp.SUM, [both[:3], both[2:5]], out=[both[1:4], both[::-1][:3].copy()])
    assert [array.tolist() for array in found] == [[0, 1, 2], [2, 3, 4]], "what is read before it is written, is as it was"


def test_what_combines_outside_run_refuses_arrays_of_the_host_too(strategy):
    ops = mpistrat.HierarchicalAllReduce()
    with strategy.scope():
        for call in (
            lambda: strategy.reduce("sum", np.ones(3), axis=None),
            lambda: strategy.gather(np.ones(3), axis=0),
            lambda: strategy.broadcast(np.ones(3)),
            lambda: ops.reduce("sum", np.ones(3), "/gpu:0"),
            lambda: ops.broadcast(np.ones(3), "rank:0"),
        ):
            with pytest.raises(InvalidArgumentError, match="is in host memory, this replica computes on /gpu:0"):
                call()


def test_cross_device_ops_combine_on_the_gpu(strategy, xp):
    array = xp.asarray(np.arange(3, dtype=np.float32))
    with strategy.scope():
        for ops in (mpistrat.HierarchicalAllReduce(), mpistrat.ReductionToOneDevice(accumulation_fn=sum)):
            assert ops.reduce("mean", array, "/gpu:0") is array
            copied = ops.broadcast(array, "rank:0")
            assert isinstance(copied, xp.ndarray)
            assert copied.tolist() == [0, 1, 2]
        [result] = mpistrat.ReductionToOneDevice(accumulation_fn=sum).all_reduce_in_replica(mpistrat.ReduceOp.MEAN, [array])
        assert isinstance(result, xp.ndarray)
        assert result.tolist() == [0, 1, 2]
