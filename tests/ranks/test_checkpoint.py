"""Checkpoints of several ranks: restored on any number of others, and what goes wrong on one rank is raised on all."""

import errno
import importlib.util
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import mpistrat
from mpistrat import AutoShardPolicy
from mpistrat.checkpoint import files, preemption
from mpistrat.errors import AgreementError, CheckpointError, InvalidArgumentError
from mpistrat.experimental import ParameterServerStrategy, PreemptionCheckpointHandler
from mpistrat.experimental.partitioners import FixedShardsPartitioner
from mpistrat.launch.bootstrap import start
from mpistrat.topology.world import World
from mpistrat.watch.record import RankFile
from mpistrat.watch.recorder import recorder
from tests.crashes import saves
from tests.crashes.saves import strategy_of
from tests.launches import on_ranks

SHAPES = ("1x1", "2x1", "1x3", "3+1")
ON_READ = mpistrat.VariableSynchronization.ON_READ


@pytest.fixture
def folder(comm, tmp_path):
    """Give a folder that all ranks share."""
    return Path(comm.bcast(str(tmp_path)))


class Training:
    """A linear model with momentum, metrics and shuffled data; what it computes is exact, so that no order of sums matters."""

    options = None

    def __init__(self, strategy):
        self.strategy, aggregations = strategy, mpistrat.VariableAggregation
        with strategy.scope():
            self.weights = mpistrat.Variable(np.zeros(5))
            self.slots = {"momentum": np.zeros(5), "steps": 0}
            metric = {"synchronization": ON_READ, "dtype": np.int64}
            self.rows = mpistrat.Variable(0, aggregation=aggregations.SUM, **metric)
            self.first = mpistrat.Variable(0, aggregation=aggregations.ONLY_FIRST_REPLICA, **metric)
            dataset = mpistrat.ArrayDataset(np.arange(22.0), 5, shuffle=True)
            self.data = strategy.experimental_distribute_dataset(dataset, self.options)
            self.rng = np.random.default_rng(1)
            self.checkpoint = mpistrat.Checkpoint(**self.objects())
        self.seen = []

    def objects(self):
        """Return what is saved; `batches` is what is iterated first."""
        self.batches = self.data
        return {name: each for name, each in vars(self).items() if name not in ("strategy", "batches")}

    def train(self, num_steps):
        """Take steps, which may begin new epochs, and return all that can be seen of the state."""
        while num_steps:
            for batch in self.batches:
                rows = self.strategy.run(self.step, args=(batch,))
                self.seen.append(sorted(self.strategy.extended.communicator.all_gather(self.strategy.local(rows)).tolist()))
                num_steps -= 1
                if not num_steps:
                    break
            else:
                self.batches = self.data
        return self.state(), int(self.rows), int(self.first)

    def state(self):
        momentum = self.slots["momentum"].tobytes()
        return self.weights.numpy().tobytes(), momentum, self.slots["steps"], self.data.state_dict()

    def gradient(self, batch):
        return mpistrat.get_replica_context().all_reduce("sum", np.full(5, batch.sum()))

    def step(self, batch):
        context = mpistrat.get_replica_context()
        self.slots["momentum"] += self.gradient(batch) * self.rng.integers(1, 9, 5)
        self.slots["steps"] += 1
        context.update(self.weights, lambda weights, change: weights + change, (self.slots["momentum"] / 4,))
        self.rows.assign_add(len(batch))
        self.first.assign_add(1)
        return batch


class InParts(Training):
    """The same, of values whose sum depends on the order; the iterator is saved."""

    options = mpistrat.InputOptions(virtual_replicas=8)
    features = np.random.default_rng(3).normal(size=(22, 5)) * 10.0 ** np.arange(-2, 3)

    def objects(self):
        found = super().objects()
        found["data"] = self.batches = iter(found["data"])
        return found

    def gradient(self, batch):
        return mpistrat.get_replica_context().sum_of_parts(self.of_part, batch, 8) / 5

    def of_part(self, rows):
        x = self.features[rows.astype(int)]
        return x.T @ (x @ self.weights.numpy() - 1)


class WithAdam(InParts):
    """A network of PyTorch besides, and Adam."""

    def objects(self):
        import torch

        torch.manual_seed(0), torch.set_num_threads(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
        self.adam = torch.optim.Adam(self.net.parameters())
        return super().objects()

    def gradient(self, batch):
        numbers, gradients = mpistrat.get_replica_context().sum_of_parts(self.of_part, batch, 8)
        for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.adam.step()
        return numbers / 5

    def of_part(self, rows):
        import torch

        x = torch.tensor(self.features[rows.astype(int)], dtype=torch.float32)
        return super().of_part(rows), torch.autograd.grad((self.net(x) - 1).square().sum(), [*self.net.parameters()])

    def state(self):
        tensors = [*self.net.parameters(), *(each for slots in self.adam.state.values() for each in slots.values())]
        return [tensor.detach().numpy().tobytes() for tensor in tensors], super().state()


@on_ranks(4)
@pytest.mark.parametrize("kind", [Training, InParts])
def test_a_job_that_is_cut_goes_on_with_equal_weights_on_any_ranks(comm, folder, kind):
    cut_and_go_on(comm, folder, kind, SHAPES)


@on_ranks(2)  # whose job has imported PyTorch, which takes seconds
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch: pip install '.[interop]'")
def test_a_job_with_an_optimizer_of_pytorch_does_so_too(comm, folder):
    importlib.import_module("torch._dynamo")  # as the first optimizer does, but on all ranks at once
    cut_and_go_on(comm, folder, WithAdam, SHAPES[:2])


@contextmanager
def some_ranks(comm, shape):
    """Give the first ranks, as many as a shape has, a strategy on its nodes; the others None."""
    size = World.from_shape(shape).size
    part = comm.Split(int(comm.rank >= size), comm.rank)
    strategy = strategy_of(part, shape) if comm.rank < size else None
    yield strategy
    if strategy is not None:
        strategy.close()
    part.Free()


def cut_and_go_on(comm, folder, kind, shapes):
    """Train and save in each shape, go on in each from each, and compare all weights with those of an uncut training."""
    found = {}
    for shape in shapes:
        with some_ranks(comm, shape) as strategy:
            if strategy is not None:
                if "undisturbed" not in found:
                    training = kind(strategy)
                    found["undisturbed"] = training.train(12)[0], training.seen
                training = kind(strategy)
                found[shape] = training.train(7)
                training.checkpoint.save(folder / shape, wait=True, step=7)
        found = comm.bcast(found)
    for shape in shapes:
        with some_ranks(comm, shape) as strategy:
            for other in shapes if strategy is not None else ():
                training = kind(strategy)
                assert training.checkpoint.restore(folder / other) == 7
                _, rows, first = found[other]
                assert (int(training.rows), int(training.first)) == (rows, first)
                whole, seen = found["undisturbed"]
                assert training.train(5)[0] == whole
                assert training.seen == seen[7:]
                training.checkpoint.close()
        comm.Barrier()
    epoch = [row for batch in found["undisturbed"][1][:5] for row in batch]
    assert sorted(epoch) == list(range(22))


@pytest.fixture
def two(comm):
    """Give a checkpoint of two ranks whose state is on both the same, and that state."""
    strategy = strategy_of(comm, f"{comm.size}x1")
    state = {"w": np.arange(8.0), "step": 1}
    with strategy.scope():
        metric = mpistrat.Variable(2.0, synchronization=ON_READ, aggregation=mpistrat.VariableAggregation.SUM)
        checkpoint = mpistrat.Checkpoint(state=state, metric=metric)
    yield checkpoint, state
    strategy.close()


def on_one(comm, rank, value, other):
    return value if comm.rank == rank else other


@on_ranks(2)
def test_a_dataset_whose_distribution_one_rank_has_refused_can_be_saved(comm, strategy):
    data, policy = mpistrat.ArrayDataset(np.arange(4), 2), on_one(comm, 1, AutoShardPolicy.FILE, AutoShardPolicy.DATA)
    with strategy.scope():
        with pytest.raises(on_one(comm, 1, InvalidArgumentError, AgreementError)):
            strategy.experimental_distribute_dataset(data, mpistrat.InputOptions(auto_shard_policy=policy))
        mpistrat.Checkpoint(data=data).close()


@on_ranks(2)
@pytest.mark.parametrize("strict", [False, True])
def test_ranks_that_disagree_are_told_and_the_job_goes_on(comm, two, folder, strict):
    checkpoint, state = two
    checkpoint._communicator.is_strict = strict
    with pytest.raises(AgreementError, match=r"(?s)step=1.*step=2"):
        checkpoint.save(folder / "a", step=on_one(comm, 0, 1, 2))
    with pytest.raises(AgreementError, match=r"(?s)/a'.*/b'"):
        checkpoint.save(folder / on_one(comm, 0, "a", "b"))
    state["w"][7] += comm.rank
    with pytest.raises(AgreementError, match=r"state/w: rank 1 does not hold what rank 0 does\n.*PerRank"):
        checkpoint.save(folder / "a")
    state["w"][7] -= comm.rank
    state["extra"] = comm.rank
    with pytest.raises(AgreementError, match="state, beside its arrays: rank 1"):
        checkpoint.save(folder / "a")
    state["extra"] = on_one(comm, 1, object(), 1)
    error = on_one(comm, 1, mpistrat.errors.UnsupportedDtypeError, AgreementError)
    with pytest.raises(error, match="state/extra is of type object"):
        checkpoint.save(folder / "a")
    with pytest.raises(AgreementError):
        checkpoint.restore(folder / "a", strict=on_one(comm, 0, True, False))
    state["extra"] = 1
    for make, mine, other, wrong in (
        (mpistrat.CheckpointManager, (folder,), (folder, 0), InvalidArgumentError),
        (mpistrat.CheckpointManager, (folder,), (None,), TypeError),
        (mpistrat.CheckpointManager, (folder,), (folder / "b",), AgreementError),
        (mpistrat.CheckpointManager, (folder,), (folder, 5, 2), AgreementError),
        (partial(PreemptionCheckpointHandler, None), (folder,), (None,), InvalidArgumentError),
        (partial(PreemptionCheckpointHandler, None), (folder,), (5,), TypeError),
        (partial(PreemptionCheckpointHandler, None), (folder,), (folder, {"grace_period": 3}), InvalidArgumentError),
    ):
        with pytest.raises(on_one(comm, 1, wrong, AgreementError)):
            make(checkpoint, *on_one(comm, 1, other, mine))
        assert preemption._active is None
    manager = mpistrat.CheckpointManager(checkpoint, folder / "all")
    for step, wrong in ((-1, InvalidArgumentError), ("1", TypeError)):
        with pytest.raises(on_one(comm, 1, wrong, AgreementError), match="step must be"):
            manager.save(on_one(comm, 1, step, 1))
    state["extra"] = on_one(comm, 1, np.inf - np.inf, np.nan)  # NaNs of other bits, which are saved alike
    checkpoint.save(folder / "a", wait=True)
    assert checkpoint.restore(folder / "a") == 0


@on_ranks(2)
def test_a_rank_that_removes_old_checkpoints_for_long_waits_for_no_other(comm, two, folder, monkeypatch):
    monkeypatch.setattr(files, "discard", lambda folders: time.sleep(4) if folders else None)
    manager = mpistrat.CheckpointManager(two[0], folder, max_to_keep=1)
    for step in range(3):
        manager.save(step)
        time.sleep(0.5)  # the other rank sees no more of this save
    manager.close()


@on_ranks(2)
def test_a_rank_that_cannot_start_a_thread_writes_by_itself(comm, two, folder, monkeypatch):
    checkpoint, state = two

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", on_one(comm, 1, refuse, threading.Thread.start))
        checkpoint.save(folder / "a", step=3)
        checkpoint.save(folder / "b", wait=True, step=4)
    state["w"][:] = 0
    assert (checkpoint.restore(folder / "a"), checkpoint.restore(folder / "b")) == (3, 4)
    assert state["w"].tolist() == list(range(8))
    checkpoint.close()


@on_ranks(2)
def test_variables_that_each_rank_has_for_itself_are_compared(comm, folder):
    variable = mpistrat.Variable(np.full(9, 1.0 + comm.rank))
    checkpoint = mpistrat.Checkpoint(variable=variable)
    with pytest.raises(AgreementError, match="variable: rank 1"):
        checkpoint.save(folder / "a")
    variable.assign(np.ones(9))
    checkpoint.save(folder / "a", wait=True)
    checkpoint.close()


@on_ranks(2)
def test_a_rank_that_cannot_write_fails_the_save_on_all(comm, two, folder, monkeypatch):
    checkpoint, state = two
    first = checkpoint.save(folder / "first", wait=True, step=1)
    write = files.write_file

    def full(path, *given):
        write(path, *given)
        if comm.rank == 1:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_file", full)
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left on device.*The last checkpoint before it is whole"):
            checkpoint.save(folder / "second", wait=True)
        assert not (folder / "second").exists()
        checkpoint.save(folder / "second")
        with pytest.raises(CheckpointError, match="No space"):  # by the next call
            checkpoint.restore(first)
        patch.setattr(files, "write_file", lambda path, *given: files.remove(path.parent) or write(path, *given))
        with pytest.raises(CheckpointError, match=r"rank \d: .* cannot be written"):
            checkpoint.save(folder / "removed", wait=True)
        patch.setattr(checkpoint, "_stage", on_one(comm, 1, None, checkpoint._stage))
        with pytest.raises(CheckpointError, match="rank 1: TypeError"):
            checkpoint.save(folder / "staged")
    with pytest.raises(CheckpointError, match=r"rank \d: NotADirectoryError"):
        checkpoint.save(Path(first) / files.MANIFEST / "inside")
    state["w"][:] = 0
    assert checkpoint.restore(first) == 1
    assert state["w"].tolist() == list(range(8))
    checkpoint.save(folder / "second", wait=True)
    checkpoint.close()


@on_ranks(1, 2)
def test_whenever_ranks_or_a_machine_stop_the_last_checkpoint_or_the_one_before_is_whole(comm, folder):
    strategy = strategy_of(comm, f"{comm.size}x1")
    logs = saves.record(comm, strategy, folder)
    num_cuts, num_states, wrong = saves.after_each_stop(comm, logs)
    strategy.close()
    assert not wrong
    assert min(num_cuts, num_states) > 40


@on_ranks(2)
def test_whichever_call_fails_all_ranks_are_told_and_the_job_goes_on(comm, folder):
    strategy = strategy_of(comm, "1x2")
    texts = list(saves.fail_each(comm, strategy, folder, [(errno.ENOSPC, True), (errno.EDQUOT, False)]))
    strategy.close()
    assert not list(filter(None, texts))
    assert len(texts) > 20


@on_ranks(2)
def test_what_one_rank_cannot_read_changes_nothing_on_any(comm, two, folder):
    checkpoint, state = two
    path = Path(checkpoint.save(folder / "first", wait=True))
    comm.Barrier()
    state["w"][:] = 0
    for name, change, told in (
        ("arrays-00001.safetensors", lambda good: good[:-1] + b"x", "bytes of .* are not those"),
        ("arrays-00000.safetensors", lambda good: good[:-1], "cannot be read"),
        (files.MANIFEST, lambda good: good.replace(b'"step": 0', b'"step": 9'), "not those that were written"),
    ):
        good = (path / name).read_bytes()
        comm.Barrier()
        if comm.rank == 0:
            (path / name).write_bytes(change(good))
        comm.Barrier()
        with pytest.raises(CheckpointError, match=f"{name}.*{told}"):
            checkpoint.restore(path)
        comm.Barrier()
        (path / name).write_bytes(good)
        assert not state["w"].any()

    class Stubborn:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            if comm.rank == 1:
                raise KeyError("slots")

    with checkpoint._strategy.scope():
        other = mpistrat.Checkpoint(state=state, metric=checkpoint._objects["metric"], other=Stubborn())
    other.save(folder / "second", wait=True)
    with pytest.raises(CheckpointError, match="rank 1: KeyError: 'slots'"):
        other.restore(folder / "second")
    comm.Barrier()
    checkpoint.restore(path)


@on_ranks(2)
def test_a_step_goes_on_while_ranks_write_and_the_next_save_waits(comm, two, folder, monkeypatch):
    checkpoint, state = two
    manager = mpistrat.CheckpointManager(checkpoint, folder / "all")
    go_on, write = threading.Event(), files.write_file
    monkeypatch.setattr(files, "write_file", lambda *given: go_on.wait(20) and write(*given))
    first = manager.save(1)
    state["w"][:] = state["step"] = 2  # after the values were copied
    assert checkpoint._communicator.all_reduce("sum", np.ones(1)) == comm.size
    assert manager.latest_checkpoint is None
    assert not (Path(first) / files.MANIFEST).exists()
    inside = RankFile.open(recorder().path).inside
    threading.Timer(0.2, lambda: seen.extend(call.text for call in inside()) or go_on.set()).start()
    seen = []
    second = manager.save(2)
    assert seen == ["Checkpoint: a save"]
    assert manager.checkpoints == [first]
    assert (checkpoint.restore(first), state["step"], state["w"].tolist()) == (1, 1, list(range(8)))
    assert (manager.restore(), state["w"][0], state["step"]) == (2, 2, 2)
    assert manager.checkpoints == mpistrat.CheckpointManager(checkpoint, folder / "all").checkpoints == [first, second]
    of_job = mpistrat.Checkpoint(state=state)  # outside all scopes
    of_job.save(folder / "job", wait=True)
    assert len(list((folder / "job").glob("arrays-*"))) == comm.size
    of_job.close()
    with pytest.raises(RuntimeError, match=r"checkpoint.save must be called outside strategy.run"):
        checkpoint._strategy.run(lambda: checkpoint.save(folder / "inside"))
    with pytest.raises(InvalidArgumentError, match="metric belongs to .*whose ranks must save it together"):
        mpistrat.Checkpoint(metric=checkpoint._objects["metric"])


@on_ranks(2)
@pytest.mark.parametrize("make", [mpistrat.experimental.CentralStorageStrategy, mpistrat.MultiWorkerMirroredStrategy])
def test_what_was_restored_is_saved_as_it_was(comm, folder, make):
    strategy = make()
    with strategy.scope():
        metric = mpistrat.Variable(7, synchronization=ON_READ, aggregation=mpistrat.VariableAggregation.SUM)
        weights = mpistrat.Variable(np.arange(3.0))
        with_metric = {"weights": weights, "metric": metric}
        checkpoint = mpistrat.Checkpoint(**with_metric)
        saved = int(metric)
        for turn in range(3):
            path = checkpoint.save(folder / str(turn), wait=True)
            weights.assign(np.zeros(3))
            metric.assign(0)
            checkpoint.restore(path)
            assert (int(metric), weights.numpy().tolist()) == (saved, [0.0, 1.0, 2.0])
    strategy.close()


@on_ranks(2)
def test_all_ranks_learn_that_one_cannot_look_at_what_was_interrupted(comm, folder, monkeypatch):
    (folder / "ckpt-00000001").mkdir(exist_ok=True)
    comm.Barrier()
    strategy = strategy_of(comm, "2x1")
    with strategy.scope():
        manager = mpistrat.CheckpointManager(mpistrat.Checkpoint(w=np.ones(1)), folder)
    monkeypatch.setattr(files, "discard", lambda folders: folders[1])
    with pytest.raises(CheckpointError, match="rank 0: IndexError: list index out of range"):
        manager.save(2)
    strategy.close()


@on_ranks(3)
def test_what_each_rank_has_for_itself_comes_back_on_as_many_ranks(comm, folder):
    def made(strategy, start):
        rank = strategy.extended.communicator.rank
        state, rng = {"w": np.full(3 * rank, start + rank), "n": start + rank}, np.random.default_rng(start + rank)
        with strategy.scope():
            shared = np.full(5, float(start))
            own = {"of/rank/state": mpistrat.PerRank(state), "rng": mpistrat.PerRank(rng)}
            checkpoint = mpistrat.Checkpoint(**own, **{"of/all": shared})
        return checkpoint, state, rng, shared

    strategy = strategy_of(comm, "2+1")
    checkpoint, state, rng, shared = made(strategy, 10)
    path = Path(checkpoint.save(folder / "one", wait=True))
    again = made(strategy, 20)
    again[0].restore(path)
    assert (again[1]["n"], again[1]["w"].tolist(), again[3].tolist()) == (state["n"], state["w"].tolist(), shared.tolist())
    assert again[2].random() == rng.random()
    owners = {name: rank for rank, found in enumerate(comm.allgather(list(again[0]._own))) for name in found}
    for file, pieces in files.read_manifest(path).pieces.items():
        assert all(file == files.file_name(owners[piece.name.removesuffix("/w")]) for piece in pieces if "@" in piece.name)
    told = f"own/w@{comm.rank} is a variable, which ranks save together"
    with strategy.scope(), pytest.raises(InvalidArgumentError, match=told):
        mpistrat.Checkpoint(**{"own/w": mpistrat.PerRank(mpistrat.Variable(1))})
    strategy.close()
    with some_ranks(comm, "2x1") as strategy:
        if strategy is not None:
            other, state, _, shared = made(strategy, 30)
            told = "of/rank/state@0, .*rng@0, rng@1, rng@2: each of 3 ranks has saved its own, and here are 2"
            with pytest.raises(CheckpointError, match=told):
                other.restore(path)
            assert other.restore(path, strict=False) == 0
            assert (state["n"], shared[0]) == (30 + comm.rank, 10)


@on_ranks(2)
def test_arrays_on_gpus_are_saved_and_restored(comm, make_pair, folder):
    pair = make_pair()
    strategy = mpistrat.Strategy(mpistrat.StrategyExtended(pair.gpu))
    with strategy.scope():
        variable, array = mpistrat.Variable(np.arange(7, dtype=np.float32)), pair.up(np.arange(12.0))
        checkpoint = mpistrat.Checkpoint(variable=variable, state={"array": array, "empty": pair.up(np.empty((0, 2)))})
        path = checkpoint.save(folder / "one", wait=True)
        variable.assign(np.zeros(7, np.float32))
        array[...] = pair.up(np.zeros(12))
        checkpoint.restore(path)
    np.testing.assert_array_equal(variable.numpy(), np.arange(7, dtype=np.float32))
    np.testing.assert_array_equal(pair.download(array), np.arange(12.0))


@on_ranks(8)
def test_the_chief_saves_and_restores_what_servers_keep_on_any_number_of_them(comm, folder):
    before = np.arange(14.0).reshape(7, 2)

    def program(coordinator):
        with coordinator.strategy.scope():
            table, number = mpistrat.Variable(before), mpistrat.Variable(3)
            checkpoint = mpistrat.Checkpoint(table=table, number=number)
        with pytest.raises(InvalidArgumentError, match=r"the other ranks serve ParameterServer.*\n.*\n.*with strategy.scope"):
            mpistrat.Checkpoint(table=table, number=number)
        shards.append(len(getattr(table, "variables", [table])))
        if not (folder / "one").exists():
            coordinator.schedule(lambda: table.assign_add(np.ones((7, 2))))
            coordinator.join()
            checkpoint.save(folder / "one", wait=True)
            coordinator.schedule(lambda: table.assign_add(np.ones((7, 2))))
            coordinator.join()
            number.assign(0)
        assert checkpoint.restore(folder / "one") == 0
        assert (int(number), table.numpy().tolist()) == (3, (before + 1).tolist())
        coordinator.schedule(lambda: table.assign_add(np.ones((7, 2))))  # what was restored is where workers find it
        coordinator.join()
        assert table.numpy().tolist() == (before + 2).tolist()

    shards = []
    for num_servers in (2, 1, 3):
        resolver = mpistrat.cluster_resolver.MPIClusterResolver(chief=1, ps=num_servers)
        ParameterServerStrategy.main(program, resolver, FixedShardsPartitioner(num_servers))
    assert start().rank or shards == [2, 1, 3]
