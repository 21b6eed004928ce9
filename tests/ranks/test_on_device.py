"""Strategies of several replicas that compute on GPUs: stand-in devices whose streams dawdle; the host is the oracle."""

import re

import numpy as np
import pytest

import mpistrat
from mpistrat.tools.train_digits import train
from tests.gpu import training_pair
from tests.gpu.bound import stand_in
from tests.launches import needs_ranks, on_ranks
from tests.variable_matrix import CELLS, check_cells, made

pytestmark = on_ranks(1, 2)  # devices that dawdle take many cores

SHAPES = {1: "1x1", 2: "1x2", 3: "2+1", 4: "2x2"}


@pytest.fixture
def gpu(comm):
    with stand_in(comm, nodes=SHAPES.get(comm.size, "")) as device:
        yield device


@pytest.fixture
def xp(gpu):
    return gpu.array_module


@pytest.fixture
def on_gpu(gpu, make_strategy):
    return make_strategy()


@on_ranks(2)
def test_training_on_gpus_gives_the_weights_of_the_host(comm, on_gpu, monkeypatch):
    monkeypatch.setattr("mpistrat.tools.train_digits.TRAINING_IMAGES", 512)
    found, steps = training_pair.check(on_gpu, epochs=1, hidden=16), 512 // 128
    assert max(found["largest_difference"], found["weights_differ_by"]) < steps * np.finfo(np.float32).eps
    assert found["accuracy"] == found["accuracy_of_other"]
    other = lambda strategy, *how, **more: train(strategy, *how, rate=0.1 if strategy is on_gpu else 0.2, **more)  # noqa: E731
    monkeypatch.setattr(training_pair.train_digits, "train", other)
    wrong = training_pair.check(on_gpu, epochs=1, hidden=16)
    assert min(wrong["largest_difference"], wrong["weights_differ_by"]) > 0.003


@needs_ranks(2)
def test_the_demo_runs_on_gpus_and_says_so(comm, gpu, tmp_path, capsys, monkeypatch):
    for package in ("rich", "matplotlib"):
        pytest.importorskip(package, reason=f"no {package}: pip install '.[demo]'")
    # rank 0 alone needs the plot, but Hypothesis draws other examples where other modules are imported
    import matplotlib.pyplot  # noqa: F401

    from mpistrat.tools import demo

    monkeypatch.setattr(demo, "HIDDEN", 64)
    monkeypatch.setattr("mpistrat.tools.train_digits.TRAINING_IMAGES", 256)
    demo.main(["--epochs", "1", "--out", str(tmp_path), "--width", "0"])
    if comm.rank == 0:
        shown = capsys.readouterr().out
        assert re.search(r"^computed   on GPUs \(.*\), combined by \w", shown, re.MULTILINE), shown
        assert (tmp_path / "training.png").exists()


def test_the_strategy_knows_where_it_computes_and_initial_values_may_be_anywhere(comm, on_gpu, xp):
    assert on_gpu.communicator.path
    assert on_gpu.array_module is xp
    assert on_gpu.extended.worker_devices == (f"/job:worker/replica:0/task:{comm.rank}/device:GPU:0",)
    # each rank brings its own kind, and that of replica 0 counts
    put = xp.asarray if comm.rank % 2 else np.asarray
    variable = made(on_gpu, put(np.arange(3.0) + comm.rank))
    assert isinstance(variable.value, xp.ndarray)
    assert variable.numpy().tolist() == [0, 1, 2]


@pytest.mark.parametrize("where", ["run", "scope", "update"])
def test_variables_do_on_gpus_what_they_do_on_the_host(on_gpu, where):
    check_cells(on_gpu, [cell for cell in CELLS if cell.where == where])


def test_a_nest_of_arrays_and_numbers_is_combined(comm, on_gpu, xp):
    def step():
        context = mpistrat.get_replica_context()
        value = {"w": xp.full((3, 2), comm.rank, np.float32), "loss": 0.5, "rows": np.float32(comm.rank), "none": xp.zeros(0)}
        started = context.start_all_reduce("sum", value)
        return context.all_reduce("sum", value), context.all_reduce("mean", value, weight=comm.rank + 1), started.wait()

    [(total, mean, started)] = on_gpu.experimental_local_results(on_gpu.run(step))
    ranks, size = sum(range(comm.size)), comm.size
    for found in (total, started):
        assert isinstance(found["w"], xp.ndarray)
        assert found["w"].tolist() == [[ranks] * 2] * 3
        assert (found["loss"], found["rows"], found["none"].shape) == (0.5 * size, ranks, (0,))
        assert (found["w"] / found["rows"]).dtype == np.float32
    weighted = sum(rank * (rank + 1) for rank in range(size)) / sum(range(1, size + 1))
    np.testing.assert_allclose(mean["w"].get(), np.full((3, 2), weighted), rtol=1e-6)
    assert float(mean["loss"]) == 0.5


def test_values_are_combined_outside_run_and_slices_added_up(comm, on_gpu, xp):
    rows = on_gpu.run(lambda: xp.full((comm.rank, 2), comm.rank, np.float64))
    rows = rows if comm.size > 1 else mpistrat.PerReplica(rows)
    ranks, squares = range(comm.size), sum(rank * rank for rank in range(comm.size))
    total = on_gpu.reduce("sum", rows, axis=0)
    assert isinstance(total, xp.ndarray)
    assert total.tolist() == [squares] * 2
    if comm.size > 1:
        assert float(on_gpu.reduce("mean", rows, axis=(0, 1))) == squares / sum(ranks)
    gathered = on_gpu.gather(rows, axis=0)
    assert isinstance(gathered, xp.ndarray)
    assert gathered[:, 0].tolist() == [rank for rank in ranks for _ in range(rank)]
    root = comm.size - 1
    assert on_gpu.broadcast(xp.full(2, comm.rank), root=root).tolist() == [root] * 2
    with on_gpu.scope():
        ops = mpistrat.ReductionToOneDevice()
        value = mpistrat.PerReplica(xp.full(2, comm.rank))
        found = ops.reduce("sum", value, f"rank:{root}")
        copied = ops.broadcast(found, {"/gpu:0"}) if comm.size > 1 else found
        [component] = on_gpu.experimental_local_results(copied)
        assert isinstance(component, xp.ndarray)
        assert component.tolist() == [sum(ranks) if comm.size > 1 else 0] * 2

    def step():
        slices = mpistrat.IndexedSlices(xp.full((2, 2), comm.rank + 1.0), xp.asarray(np.array([comm.rank, 0])), (comm.size, 2))
        return mpistrat.get_replica_context().all_reduce("sum", slices)

    [total] = on_gpu.experimental_local_results(on_gpu.run(step))
    assert isinstance(total.values, xp.ndarray)
    expected = np.arange(1.0, comm.size + 1)
    expected[0] += expected.sum()
    assert total.to_dense()[:, 0].tolist() == expected.tolist()


@needs_ranks(2)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_an_array_of_the_host_is_refused(comm, gpu, xp, make_strategy, strict):
    strategy = make_strategy(STRICT=strict)
    for _ in range(2):  # arrays of the host that are ours go their own way, and are remembered
        strategy.extended.communicator.all_reduce(mpistrat.ReduceOp.SUM, [np.ones(3)])
    culprits = {0} if strict == "1" else set(range(comm.size))  # alone, it can be told of in strict mode only
    error = mpistrat.errors.InvalidArgumentError if comm.rank in culprits else mpistrat.errors.AgreementError
    message = r"w'\] is in host memory, this replica computes on /gpu:0; copy it first, strategy\.array_module\.asarray"
    for verb in ("all_reduce", "start_all_reduce"):

        def step(verb=verb):
            value = {"w": (np if comm.rank in culprits else xp).ones(3)}
            result = getattr(mpistrat.get_replica_context(), verb)("sum", value)
            return result if verb == "all_reduce" else result.wait()

        with pytest.raises(error, match=message):
            strategy.run(step)
    with pytest.raises(error, match=message.removeprefix(r"w'\]")):
        strategy.reduce("sum", mpistrat.PerReplica((np if comm.rank in culprits else xp).ones(3)), axis=None)
    total = strategy.local(strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", xp.ones(3))))
    assert total.tolist() == [comm.size] * 3, "the strategy goes on"


def test_batches_come_to_the_gpu_of_each_replica(comm, on_gpu, xp):
    batches = [np.arange(5.0), np.arange(5.0, 6.0)]  # a generator-like source: not all get rows
    dataset = on_gpu.experimental_distribute_dataset(batches)
    for _ in range(2):
        rows = [on_gpu.experimental_local_results(batch)[0] for batch in dataset]
        assert all(isinstance(part, xp.ndarray) for part in rows)
        gathered = [on_gpu.gather(mpistrat.PerReplica(part), axis=0).tolist() for part in rows]
        assert gathered == [list(range(5)), [5]]


def test_central_storage_keeps_variables_on_a_gpu(comm):
    with stand_in(comm, nodes=f"1x{comm.size}") as device:
        strategy = mpistrat.experimental.CentralStorageStrategy()
        variable = made(strategy, np.zeros(2), aggregation=mpistrat.VariableAggregation.SUM)
        strategy.run(lambda: variable.assign_add(np.full(2, comm.rank + 1.0)))
        assert isinstance(variable.value, device.array_module.ndarray)
        assert variable.numpy().tolist() == [comm.size * (comm.size + 1) / 2] * 2
        strategy.close()
