"""Checkpoints of one rank: which values come back, what does not fit, which are kept, and the command line."""

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict, namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.checkpoint import files
from mpistrat.checkpoint.files import write_file
from mpistrat.checkpoint.tree import Tree, restored
from mpistrat.errors import CheckpointError, InvalidArgumentError, UnsupportedDtypeError
from mpistrat.groups.agreement import digest_of
from mpistrat.tools import cli
from tests.processes import python
from tests.reference import read_only

Pair = namedtuple("Pair", "first second")  # noqa: PYI024
DTYPES = ["float64", "float16", ml_dtypes.bfloat16, "bool", "complex64", ">f8", "int8", np.longdouble]


def saved_and_restored(path, before, after):
    mpistrat.Checkpoint(**before).save(path, wait=True, step=3)
    assert mpistrat.Checkpoint(**after).restore(path) == 3
    return after


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_come_back_bit_by_bit(tmp_path, dtype):
    def arrays(start):
        base = (np.arange(24) * 7 + start).reshape(4, 6).astype(dtype)
        return {"c": base, "t": base.T[::2].copy().T, "cut": base[::2, 1::2], "0-d": base[1, 2].copy()[...], "none": base[:0]}

    wanted = arrays(1)
    nest = {"nest": {"fixed": read_only(arrays(1)["c"]), "pair": Pair([arrays(1)["t"]], 2)}}
    fresh = {"nest": {"fixed": read_only(arrays(0)["c"]), "pair": Pair([arrays(0)["t"]], 0)}}
    got = saved_and_restored(tmp_path / "one", {**wanted, **nest}, {**arrays(0), **fresh})
    for name, array in wanted.items():
        assert (got[name].dtype, got[name].tobytes()) == (array.dtype, array.tobytes())
    assert isinstance(got["nest"]["pair"], Pair)
    assert got["nest"]["pair"].second == 2
    np.testing.assert_array_equal(got["nest"]["pair"].first[0], wanted["t"])
    np.testing.assert_array_equal(got["nest"]["fixed"], wanted["c"])


def test_plain_values_and_generators_come_back(tmp_path):
    rng, old = np.random.default_rng(1), np.random.Generator(np.random.MT19937(1))
    rng.random(3), old.random(3)
    state = {"step": 7, 3: [None, True, 2.5, "é"], "nan": float("nan"), "rows": (1, 2)}
    fresh = {"step": 0, "list": [1], "old": 5}
    others = {"rng": np.random.default_rng(5), "old": np.random.Generator(np.random.MT19937(5))}
    saved_and_restored(tmp_path / "one", {"state": state, "rng": rng, "old": old}, {"state": fresh, **others})
    assert np.isnan(fresh.pop("nan"))
    assert fresh == {"step": 7, 3: [None, True, 2.5, "é"], "rows": (1, 2), "list": [1], "old": 5}
    assert (others["rng"].random(), others["old"].random()) == (rng.random(), old.random())


def test_the_state_of_a_module_is_not_taken_for_that_of_an_older_version(tmp_path):
    torch = pytest.importorskip("torch")

    class Renewed(torch.nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
            if local_metadata.get("version") != 2:  # as PyTorch's own modules convert what an older one has saved
                state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 10
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    class Trainer:
        def __init__(self):
            self.net = net()

        def state_dict(self):
            return {"net": self.net.state_dict()}

        def load_state_dict(self, state):
            self.net.load_state_dict(state["net"])

    def net(width=3):
        return torch.nn.Sequential(Renewed(width, 2, dtype=torch.bfloat16))

    before, after = ({"net": net(), "trainer": Trainer()} for _ in range(2))
    saved_and_restored(tmp_path / "one", before, after)
    assert torch.equal(after["net"][0].weight, before["net"][0].weight)
    assert torch.equal(after["trainer"].net[0].weight, before["trainer"].net[0].weight)
    with pytest.raises(CheckpointError, match=r"net/0.weight has bfloat16 \(2, 4\) here, and bfloat16 \(2, 3\) there"):
        mpistrat.Checkpoint(net=net(4), trainer=Trainer()).restore(tmp_path / "one")
    with_versions = ["dict", [["weight", 2.5]], {"": {"version": 2}}]  # as they were saved once
    assert restored(with_versions, {}) == {"weight": 2.5}


def test_arrays_of_jax_come_back_in_a_dict(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    got = saved_and_restored(tmp_path / "one", {"nest": {"w": jnp.arange(3)}}, {"nest": {"w": jnp.zeros(3, int)}})
    assert isinstance(got["nest"]["w"], jnp.ndarray)
    assert got["nest"]["w"].tolist() == [0, 1, 2]
    with pytest.raises(InvalidArgumentError, match="cannot be restored in place"):
        mpistrat.Checkpoint(w=jnp.zeros(3))


def test_all_that_does_not_fit_is_told_and_nothing_is_changed(tmp_path):
    data, rng = mpistrat.ArrayDataset(np.arange(4), 2), np.random.default_rng(0)
    one = mpistrat.Checkpoint(w=np.ones(3), gone=np.ones(2), d={"a": np.ones(2), "t": (rng,)}, data=data, rng=rng, kind={})
    path = one.save(tmp_path / "one", wait=True)
    old = np.random.Generator(np.random.MT19937(5))
    w, nest = np.zeros(3), {"a": np.zeros((2, 1)), "b": np.zeros(1), "t": (old,)}
    other = mpistrat.Checkpoint(w=w, d=nest, new=np.zeros(1), rng=old, kind=np.zeros(1))
    with pytest.raises(CheckpointError) as told:
        other.restore(path)
    lines = [line.strip() for line in str(told.value).splitlines()[1:]]
    assert sorted(lines) == [
        "d/a has float64 (2, 1) here, and float64 (2,) there",
        "d/b is missing there",
        "d/t/0 is a generator MT19937 here, and PCG64 there",
        "data is unexpected: nothing here has this name",
        "gone is unexpected: nothing here has this name",
        "kind is missing there",
        "kind is of kind array here, and dict there",
        "new is missing there",
        "rng is a generator MT19937 here, and PCG64 there",
    ]
    fits = mpistrat.Checkpoint(w=w, d={"b": nest["b"]}, new=np.full(1, 7.0))
    with pytest.raises(CheckpointError):
        fits.restore(path)
    assert not w.any()
    fits.restore(path, strict=False)
    assert w.all()


def test_what_cannot_be_saved_or_restored_in_place_is_refused(tmp_path):
    one, plain = np.ones(1), (1, "text", (np.ones(2),), read_only(np.ones(2)), np.float64(1))
    circle, deep = {}, []
    circle["again"] = [circle]
    for _ in range(170):  # Python could save it, and not restore it
        deep = [deep]
    for objects, error, message in (
        *(({"value": value}, InvalidArgumentError, "is of type .*, and cannot be restored in place") for value in plain),
        *(({"value": value}, UnsupportedDtypeError, "value/") for value in ({"a": object()}, [np.array(["text"])])),
        ({"value": {1: one, "1": one}}, InvalidArgumentError, "two arrays of the checkpoint have the name value/1"),
        ({"value": {1: mpistrat.Variable(0), "1": one}}, InvalidArgumentError, "two arrays .* have the name value/1"),
        ({"a@1": one}, InvalidArgumentError, "a@1 is a name as those of PerRank values are saved under"),
        *(({"nest": nest}, InvalidArgumentError, "nest contains itself, or has more than 100") for nest in (circle, deep)),
        ({"__metadata__": one}, InvalidArgumentError, "the name __metadata__ is reserved"),
    ):
        with pytest.raises(error, match=message):
            mpistrat.Checkpoint(**objects)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    checkpoint = mpistrat.Checkpoint(w=np.ones(1))
    with pytest.raises(CheckpointError, match="holds what is no part of a checkpoint"):
        checkpoint.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    with pytest.raises(InvalidArgumentError, match="step must be at least 0; got -1"):
        checkpoint.save(tmp_path / "one", step=-1)
    path = checkpoint.save(tmp_path / "one", wait=True)
    with pytest.raises(CheckpointError, match="is a checkpoint already"):
        checkpoint.save(path)
    checkpoint.close()
    for use in checkpoint.save, lambda folder: mpistrat.CheckpointManager(checkpoint, folder):
        with pytest.raises(RuntimeError, match="was closed: close it once, after the last save or restore"):
            use(tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"no.udcff is no whole checkpoint"):
        mpistrat.Checkpoint(w=np.zeros(3)).restore(tmp_path / os.fsdecode(b"no\xff"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_before_it_has_written_fails_the_save(tmp_path, monkeypatch):
    manager = mpistrat.CheckpointManager(mpistrat.Checkpoint(w=np.ones(1)), tmp_path)
    monkeypatch.setattr(files, "write_file", lambda *given: sys.exit())
    with pytest.raises(CheckpointError, match=r"rank 0: the thread that writes has ended\. The last"):
        manager.save(1, wait=True)
    assert manager.latest_checkpoint is None


def test_what_the_thread_raises_is_told_at_once_and_fails_no_save_that_is_durable(tmp_path, monkeypatch):
    manager, told = mpistrat.CheckpointManager(mpistrat.Checkpoint(w=np.ones(1)), tmp_path), []
    monkeypatch.setattr(threading, "excepthook", lambda given: told.append((given.exc_type, given.thread.name)))
    monkeypatch.setattr(files, "discard", lambda folders: 1 // 0)
    path = manager.save(1)
    manager.close()
    assert told == [(ZeroDivisionError, "mpistrat-checkpoint_0")]
    assert manager.latest_checkpoint == path


def test_the_thread_that_writes_leaves_the_cores_to_the_steps_whose_time_is_not_counted(tmp_path, monkeypatch):
    niceness = []

    def write(*given):
        niceness.append(os.getpriority(os.PRIO_PROCESS, 0))
        return write_file(*given)

    monkeypatch.setattr(files, "write_file", write)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    checkpoint = mpistrat.Checkpoint(x=np.ones(3))
    for name in ("one", "two"):
        checkpoint.save(tmp_path / name)
    checkpoint.close()
    assert niceness == [min(before + files._NICER, 19)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_forked_child_waits_for_nothing_that_its_parent_writes(tmp_path):
    program = f"""
import os
import numpy as np
import mpistrat
from mpistrat.checkpoint import files

reading, writing = os.pipe()
write_file = files.write_file
files.write_file = lambda *given: os.read(reading, 1) and write_file(*given)
checkpoint = mpistrat.Checkpoint(w=np.ones(3))
checkpoint.save("{tmp_path}/parent")
if os.fork() == 0:
    files.write_file = write_file
    checkpoint.save("{tmp_path}/child")
else:
    print(os.wait()[1])
    os.write(writing, b"x")
"""
    assert python(program).stdout == "0\n"
    assert all((tmp_path / name / files.MANIFEST).is_file() for name in ("parent", "child"))


def test_the_time_that_steps_have_meanwhile_is_not_counted_as_that_of_a_save(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "sched_yield", lambda: time.sleep(1.0))
    checkpoint = mpistrat.Checkpoint(x=np.ones(1 << 16))
    checkpoint.save(tmp_path / "x", wait=True)
    assert 0 < checkpoint._writer.longest_seconds < 0.9


def test_the_newest_are_kept_and_the_command_line_tells_them(tmp_path, capsys):
    state = {"w": np.ones(1000)}
    manager = mpistrat.CheckpointManager(mpistrat.Checkpoint(state=state), tmp_path, max_to_keep=2, keep_every=4)
    assert (manager.latest_checkpoint, manager.restore()) == (None, None)
    for step in (1, 4, 5, 6, 7, 7):
        state["w"][:] = step
        manager.save(step)
    manager.close()
    names = ["ckpt-00000004", "ckpt-00000006", "ckpt-00000007.1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert manager.checkpoints == [str(tmp_path / name) for name in names]
    (tmp_path / "ckpt-00000009").mkdir()  # a save that was stopped
    again = mpistrat.CheckpointManager(mpistrat.Checkpoint(state=state), tmp_path)
    assert (again.checkpoints, again.restore(), state["w"][0]) == (manager.checkpoints, 7, 7)
    again.save(8, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "ckpt-00000008"]

    assert cli.main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["bytes"]) for row in rows] == [(step, 8000) for step in (4, 6, 7, 8)]
    assert cli.main(["checkpoint", "show", str(tmp_path)]) == 0
    assert "state/w" in (shown := capsys.readouterr().out)
    assert "float64 (1000,)" in shown
    assert "step 8, 1 array of 7.812 KiB\nwritten by 1 rank, mpistrat" in shown
    [file] = (tmp_path / names[1]).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again.close()
    again = mpistrat.CheckpointManager(mpistrat.Checkpoint(state=state), tmp_path)
    [newest] = Path(again.checkpoints[-1]).glob("*.safetensors")
    was = newest.read_bytes()
    newest.write_bytes(was[:-1] + b"x")
    told = r"(?s)not those that were written.*ckpt-00000007.1: checkpoint.restore\(manager.ch"
    with pytest.raises(CheckpointError, match=told):
        again.restore()
    newest.write_bytes(was)
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(", whole") for line in lines] == [True, False, True, True]
    assert "the bytes of state/w are not those that were written" in lines[1]
    (tmp_path / "other" / files.MANIFEST).mkdir(parents=True)  # no regular file; a pipe would be waited for
    for name in ("none", "other"):
        assert cli.main(["checkpoint", "list", str(tmp_path / name)]) == 1
        assert "holds no checkpoint" in capsys.readouterr().err


def test_a_save_goes_on_when_the_program_changes_its_directory(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    checkpoint = mpistrat.Checkpoint(w=np.ones(3))
    manager = mpistrat.CheckpointManager(checkpoint, "kept", max_to_keep=1)
    for step, folder in enumerate(("two", "one")):
        manager.save(step)
        monkeypatch.chdir(tmp_path / folder)
    checkpoint.save("alone")
    monkeypatch.chdir(tmp_path)
    manager.close()
    assert sorted(map(str, tmp_path.rglob(files.MANIFEST))) == [
        str(tmp_path / "one" / folder / files.MANIFEST) for folder in ("alone", "kept/ckpt-00000001")
    ]


def test_managers_of_one_directory_leave_what_the_other_has_saved(tmp_path, monkeypatch):
    """What was interrupted is removed; not what another manager is saving, or has saved under that name since."""
    began = threading.Event()

    def slow(*given):
        began.wait(0.3)
        write_file(*given)

    monkeypatch.setattr(files, "write_file", slow)
    first, second = (mpistrat.Checkpoint(w=np.full(3, value)) for value in (1.0, 2.0))
    one = mpistrat.CheckpointManager(first, tmp_path)
    one.save(1)
    for step in (2, 4, 5):
        (tmp_path / f"ckpt-0000000{step}").mkdir()
    two = mpistrat.CheckpointManager(second, tmp_path)
    for manager, step in ((one, 2), (two, 3), (one, 4)):
        manager.save(step)
    one.close()
    two.close()
    assert two.checkpoints == [str(tmp_path / f"ckpt-0000000{step}") for step in (1, 3)]
    whole = sorted(str(path.parent) for path in tmp_path.rglob(files.MANIFEST))
    assert whole == sorted({*one.checkpoints, *two.checkpoints}) == sorted(map(str, tmp_path.iterdir()))
    checkpoint = mpistrat.Checkpoint(w=np.ones(3))
    managers = [mpistrat.CheckpointManager(checkpoint, tmp_path) for _ in range(2)]
    saved = [manager.save(9, wait=True) for manager in managers]  # as the handler of a signal, and then the program
    assert saved == [str(tmp_path / f"ckpt-00000009{turn}") for turn in ("", ".1")]
    assert all(Path(folder).exists() for folder in saved)


def test_scalars_of_numpy_stay_scalars_also_where_a_number_was(tmp_path):
    saved = {"best": np.float64(3), "n": np.int64(2), "root": np.complex64(1j), "small": ml_dtypes.bfloat16(0.5), "plain": 1.0}
    path = mpistrat.Checkpoint(state=dict(saved)).save(tmp_path / "one", wait=True)
    for state in (dict.fromkeys(saved, 0), dict.fromkeys(saved, np.float64(0)), {}):
        mpistrat.Checkpoint(state=state).restore(path, strict=bool(state))
        assert state == saved
        assert {name: type(state[name]) for name in saved} == {name: type(value) for name, value in saved.items()}
    for name, before, here in (("two", np.float64(1), np.zeros(())), ("three", np.ones(()), np.float64(0))):
        after = saved_and_restored(tmp_path / name, {"state": {"total": before}}, {"state": {"total": here}})
        assert after["state"]["total"] == 1, "an array without axes, and a scalar in its place"


def test_a_scope_in_which_variables_are_restored_need_not_be_theirs(tmp_path):
    strategy, plain = mpistrat.OneDeviceStrategy(), mpistrat.Variable(1.0)
    with strategy.scope():
        own = mpistrat.Variable(2.0)
        checkpoint = mpistrat.Checkpoint(plain=plain, own=own)
        path = checkpoint.save(tmp_path / "one", wait=True)
    plain.assign(0.0), own.assign(0.0)
    with strategy.scope():
        checkpoint.restore(path)
        assert mpistrat.get_strategy() is strategy
    assert (float(plain), float(own)) == (1, 2)


@pytest.mark.parametrize("from_function", [False, True])
def test_a_dataset_that_was_distributed_is_refused(from_function):
    strategy, dataset = mpistrat.OneDeviceStrategy(), mpistrat.ArrayDataset(np.arange(4), 2)
    if from_function:
        strategy.distribute_datasets_from_function(lambda context: dataset)
    else:
        strategy.experimental_distribute_dataset(dataset)
    for objects in ({"dataset": dataset}, {"state": {"dataset": dataset}}):
        with pytest.raises(InvalidArgumentError, match="dataset was distributed"):
            mpistrat.Checkpoint(**objects)
    other = dataset.shard(2, 0)  # which has a position of its own
    with pytest.raises(InvalidArgumentError, match="FILE shards files"):
        strategy.experimental_distribute_dataset(other, mpistrat.InputOptions(auto_shard_policy=mpistrat.AutoShardPolicy.FILE))
    mpistrat.Checkpoint(other=other)


def test_an_iterator_goes_on_where_that_of_another_job_was(tmp_path):
    def made():
        data = mpistrat.ArrayDataset(np.arange(10), 2, shuffle=True)
        return data, iter(data)

    def rest(data, iterator):
        return [[batch.tolist() for batch in each] for each in (iterator, data, data)]

    for taken in (0, 2, 5):
        (data, iterator), (other, fresh) = made(), made()
        for _ in range(taken):
            next(iterator), next(fresh)
        next(fresh, None)
        saved_and_restored(tmp_path / str(taken), {"iterator": iterator}, {"iterator": fresh})
        assert rest(data, iterator) == rest(other, fresh)
    next(iterator, None)  # ended: the next epoch is what goes on
    saved_and_restored(tmp_path / "ended", {"iterator": iterator}, {"iterator": fresh})
    assert [batch.tolist() for batch in fresh] == [batch.tolist() for batch in data]
    with pytest.raises(InvalidArgumentError, match="data and nest/0 have the position of one dataset"):
        mpistrat.Checkpoint(data=data, nest=[iterator])
    once = iter(mpistrat.inputs.sources.as_dataset(iter([np.ones(2)])))
    with pytest.raises(CheckpointError, match="once: its batches come from an iterator"):
        mpistrat.Checkpoint(once=once).restore(mpistrat.Checkpoint(once=once).save(tmp_path / "once", wait=True))


def test_a_position_in_other_data_is_refused_before_anything_is_changed(tmp_path):
    def made(batch_size, seed=0):
        data = mpistrat.ArrayDataset(np.arange(12), batch_size, shuffle=True, seed=seed)
        return data, {"w": np.full(2, float(batch_size)), "data": data}

    data, objects = made(4)
    whole = np.concatenate([*data])
    data, objects = made(4)
    next(iter(data))
    path = mpistrat.Checkpoint(**objects).save(tmp_path / "one", wait=True)
    for batch_size, seed in ((3, 0), (2, 1)):
        _, others = made(batch_size, seed)
        with pytest.raises(CheckpointError, match=r"data: batch 1 of an epoch .* seed 0, batches of 4, and now .* batches of"):
            mpistrat.Checkpoint(**others).restore(path)
        assert (others["w"][0], others["data"].state_dict()["batch"]) == (batch_size, 0)
    data, objects = made(2)
    mpistrat.Checkpoint(**objects).restore(path)
    assert [*np.concatenate([*data])] == [*whole[4:]]


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_saves_compare_other_elements_until_all_have_been(dtype):
    array = np.zeros((100, 100), dtype)
    paths = [f"checkpoints/ckpt-{step:08}" for step in range(0, 1_000_000, 1000)]
    before = [Tree({"w": array}).digest(1 << 12, path) for path in paths]
    for index in (0, 1, 5003, 9999):
        array.flat[index] = 1
        told = [Tree({"w": array}).digest(1 << 12, path) != text for path, text in zip(paths, before, strict=True)]
        assert any(told[:200])
        assert not all(told)
        array.flat[index] = 0


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble"])
@pytest.mark.parametrize("most_bytes", [None, 1 << 6])
def test_bytes_between_numbers_are_not_compared(dtype, most_bytes):
    digests = set()
    for filling in (b"\0", b"\1"):
        array = np.frombuffer(bytearray(filling * np.dtype(dtype).itemsize * 12), dtype).reshape(3, 4)
        array[...] = np.linspace(0, 1, 12, dtype=np.longdouble).reshape(3, 4)
        digests.add(Tree({"w": array.T}).digest(most_bytes, "one"))
    array[...] += 1
    assert len(digests) == 1
    assert Tree({"w": array.T}).digest(most_bytes, "one") not in digests


def test_what_saves_compare_is_not_kept():
    before = digest_of.cache_info().misses
    for step in range(3):
        Tree({"w": np.full(3, step)}).digest(None, "checkpoints/one")
    assert digest_of.cache_info().misses == before


class Scheduler:
    def __init__(self, milestones):
        self.nest = {"milestones": Counter(milestones), "slots": defaultdict(list, {1: [2]}), "rows": np.ones(2)}

    def state_dict(self):
        return self.nest

    def load_state_dict(self, state):
        self.nest = state


def test_dicts_of_other_classes_stay_in_them(tmp_path):
    before, after = ({"object": Scheduler(each), "state": {"count": Counter(each)}} for each in ([2, 5, 5], [5, 7]))
    nest = after["object"].nest
    saved_and_restored(tmp_path / "one", before, after)
    found = after["object"].nest
    assert (type(found["slots"]), found["slots"], found["slots"][3]) == (defaultdict, {1: [2], 3: []}, [])
    assert [*found["milestones"].elements()] == [2, 5, 5]
    assert [*nest["milestones"].elements()] == [5, 7]  # what the object has held is its own
    assert after["state"]["count"] == Counter({5: 2, 7: 1, 2: 1})
