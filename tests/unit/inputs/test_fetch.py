"""Batches that are brought to the GPU: all of them, in order, into arrays that stay as they are; on a stand-in device."""

import sys
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.device.binding import bound_device
from mpistrat.inputs.distribute import distribute_from_function
from mpistrat.inputs.prefetch import fetched
from tests.gpu.stand_in_arrays import stand_in_gpu
from tests.other_arrays import StandardArray, fake_torch

BUFFERS = pytest.mark.parametrize("buffer_size", [0, 1, 3])


@pytest.fixture(params=range(3))
def gpu(request):
    with stand_in_gpu(request.param) as device:
        yield device


def batches(count=9):
    for number in range(count):
        rows = 4 if number != count - 1 else 1  # the last batch is smaller, …
        rows = 7 if number == 3 else rows  # … and one larger than those before
        x = np.full((rows, 3), number, np.float32)
        yield {
            "x": x,
            "y": np.arange(rows)[::-1],
            "half": x[:, :1].astype(np.dtype(ml_dtypes.bfloat16)),
            "none": x[:0],
            "text": np.array(["a"] * rows),
        }


def copied_late(target, source):
    """Leave much to do on the current stream, and then a copy of an array of 32 bytes into another one."""
    into, out_of = (array.__cuda_array_interface__["data"][0] for array in (target, source))
    for _ in range(50):
        bound_device().current_stream().copy(into, into, 32)
    bound_device().current_stream().copy(into, out_of, 32)


@BUFFERS
def test_every_batch_arrives_and_stays_as_it_was_also_where_it_is_on_the_gpu(gpu, buffer_size):
    found = []
    with gpu.activate(gpu.stream()):
        for batch in fetched(batches(), buffer_size, gpu):
            found.append(batch)
            batch["x"] += 1  # the program may write to what is its own
        for batch, sent in zip(found, batches(), strict=True):
            assert batch["text"].tolist() == sent["text"].tolist()
            assert type(batch["text"]) is np.ndarray
            for name in ("x", "y", "half", "none"):
                assert isinstance(batch[name], gpu.array_module.ndarray)
                assert (batch[name].dtype, batch[name].shape) == (sent[name].dtype, sent[name].shape)
                np.testing.assert_array_equal(batch[name].get(), sent[name] + (name == "x"))
    xp = gpu.array_module
    with gpu.activate(gpu.stream()):
        made = [xp.asarray(np.full(4, number)) for number in range(6)]
        found = list(fetched((made[number] + 0 for number in range(6)), buffer_size, gpu))
        assert [array.tolist() for array in found] == [[number] * 4 for number in range(6)]
        kept = [list(fetched(iter(made), buffer_size, gpu, lifts)) for lifts in (True, False)]
        made[2][...] = 77
        assert [arrays[2].tolist() for arrays in kept] == [[2] * 4] * 2


@BUFFERS
@pytest.mark.parametrize("lifts", [True, False])
def test_what_a_dataset_computes_with_or_leaves_on_its_stream_is_there_by_then(gpu, buffer_size, lifts):
    xp = gpu.array_module

    def source():
        yield data + 1
        array, late = xp.zeros(4), xp.ones(4)
        copied_late(array, late)
        yield array

    with gpu.activate(gpu.stream()):
        data, late = xp.zeros(4), xp.ones(4)
        copied_late(data, late)
        assert [array.tolist() for array in fetched(source(), buffer_size, gpu, lifts)] == [[2] * 4, [1] * 4]


def test_any_thread_may_take_batches(gpu):
    found = []
    thread = threading.Thread(target=lambda: found.extend(fetched(iter([np.ones(2)] * 3), 1, gpu)))
    thread.start()
    thread.join(10)
    assert [batch.tolist() for batch in found] == [[1, 1]] * 3


def test_a_dataset_that_is_asked_in_turn_sees_what_the_program_computed_before(gpu):
    xp = gpu.array_module
    with gpu.activate(gpu.stream()):
        state, late = xp.zeros(4), xp.zeros(4)
        elements = fetched((state + 0 for _ in range(3)), 0, gpu)
        for step in range(3):
            late += 1
            copied_late(state, late)
            assert next(elements).tolist() == [step + 1] * 4


def test_the_second_epoch_allocates_nothing_on_the_gpu(gpu, monkeypatch):
    sizes = []
    for verb in ("allocate", "pinned"):
        original = getattr(gpu, verb)
        monkeypatch.setattr(gpu, verb, lambda nbytes, original=original: sizes.append(nbytes) or original(nbytes))
    same = [np.zeros((4, 3))] * 20
    assert len(list(fetched(iter(same), 1, gpu))) == 20
    assert sizes == [256] * 4


def test_a_batch_that_the_program_has_dropped_is_freed_while_the_source_makes_another(gpu):
    goes_on = threading.Event()
    elements = fetched((np.ones(2) for number in range(3) if number < 2 or goes_on.wait(10)), 1, gpu)
    dropped = weakref.ref(next(elements))
    next(elements)
    assert dropped() is None
    goes_on.set()
    assert len(list(elements)) == 1, "the thread that makes them has ended before the device does"


@BUFFERS
def test_an_error_of_the_source_comes_where_it_falls_due(gpu, buffer_size):
    def source():
        yield np.zeros(3)
        raise OSError("planted")

    elements = fetched(source(), buffer_size, gpu)
    assert next(elements).tolist() == [0, 0, 0]
    with pytest.raises(OSError, match="planted"):
        next(elements)


def _fed(dataset, options=None):
    return mpistrat.OneDeviceStrategy().experimental_distribute_dataset(dataset, options)


def test_rows_may_be_on_the_gpu_from_the_start_and_stay_in_host_memory_where_that_is_asked_for(gpu):
    x = gpu.array_module.asarray(np.arange(10.0))
    for options in (None, mpistrat.InputOptions(experimental_fetch_to_device=False)):
        found = list(_fed(mpistrat.ArrayDataset(x, 4, shuffle=True), options))
        assert all(isinstance(batch, gpu.array_module.ndarray) for batch in found)
        assert sorted(row for batch in found for row in batch.tolist()) == list(range(10))
    for source in ([x[:3], x[3:6]], mpistrat.MapDataset(x, 3, drop_remainder=True)):
        assert [batch.tolist() for batch in _fed(source)][:2] == [[0, 1, 2], [3, 4, 5]]
    options = mpistrat.InputOptions(experimental_fetch_to_device=False)
    assert all(type(batch) is np.ndarray for batch in _fed(mpistrat.ArrayDataset(np.arange(10.0), 4), options))
    options = mpistrat.InputOptions(False, mpistrat.InputReplicationMode.PER_REPLICA, True)
    with pytest.raises(NotImplementedError, match=r"datasets are in host memory, and this replica is on /gpu:0"):
        distribute_from_function(mpistrat.OneDeviceStrategy(), lambda _: batches(), options, accepts_per_replica=True)


def test_arrays_of_other_libraries_go_to_the_gpu(gpu, monkeypatch):
    [batch] = fetched(iter([StandardArray(np.ones(2))]), 0, gpu)
    assert isinstance(batch, gpu.array_module.ndarray)
    assert batch.tolist() == [1, 1]
    torch = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    [batch] = fetched(iter([torch.Tensor(np.ones(2))]), 0, gpu)
    assert type(batch) is torch.Tensor
    assert (str(batch.device), batch.array.tolist()) == ("cuda:0", [1, 1])


def test_without_a_gpu_nothing_changes():
    for fetch in (None, True, False):
        options = mpistrat.InputOptions(experimental_fetch_to_device=fetch)
        assert all(type(batch) is np.ndarray for batch in _fed(mpistrat.ArrayDataset(np.arange(4.0), 2), options))
