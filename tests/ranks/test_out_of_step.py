"""Ranks that differ where they must not: everybody learns of it, nobody computes with it."""

import time

import numpy as np
import pytest

from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import AgreementError, DeadlineExceededError, SettingError, UnavailableError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.inputs.sources import ArrayDataset
from mpistrat.reduction import ReduceOp
from mpistrat.topology.world import World
from tests.launches import needs_ranks, up_to_ranks

SUM = ReduceOp.SUM


def one_node(comm):
    return Communicator(Hierarchy(comm, World.from_shape(f"1x{comm.size}")))


@needs_ranks(2)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CHUNK_BYTES", "300000"), ("STRICT", "0"), ("INTRA_TRANSPORT", "mpi"), ("ALGORITHM", "flat"),
        ("MAX_MESSAGE_BYTES", "4096"),
    ],
)  # fmt: skip
def test_settings_that_differ_are_an_error_on_every_rank(comm, monkeypatch, name, value):
    if comm.rank == 0:
        monkeypatch.setenv(f"MPISTRAT_{name}", value)
    with pytest.raises(AgreementError, match=rf"(?s)rank 0: settings .*MPISTRAT_{name}=.*\n  ranks? 1.*mpiexec -x NAME"):
        one_node(comm)


@needs_ranks(2)
def test_a_setting_that_one_rank_cannot_read_is_told_to_all(comm, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setenv("MPISTRAT_ALGORITHM", "best")
    with pytest.raises(SettingError if comm.rank == 1 else AgreementError, match="MPISTRAT_ALGORITHM='best'"):
        one_node(comm)


def test_a_deadline_of_its_own_on_each_rank_changes_nothing(comm, world):
    ops = Communicator(Hierarchy(comm, world))
    for turn in range(6):
        options = CommunicationOptions(algorithm="hierarchical", timeout_seconds=20 + (turn * comm.rank) % 3)
        given = [np.full(1000, comm.rank + turn, dtype) for dtype in (np.float32, np.int8)]
        expected = sum(rank + turn for rank in range(comm.size))
        assert all((total == expected).all() for total in ops.all_reduce(SUM, given, options))
    ops.close()


def test_results_may_be_written_over_other_arrays_of_the_batch(comm, world):
    ops = Communicator(Hierarchy(comm, world))
    for algorithm in ("flat", "hierarchical"):
        options = CommunicationOptions(algorithm=algorithm)
        a, b = np.full(900_000, 1.0, np.float32), np.full(900_000, 2.0, np.float32)
        ops.all_reduce(SUM, [a, b], options, out=[b, a])
        assert (b == ops.size).all(), algorithm
        assert (a == 2 * ops.size).all(), algorithm
        line = np.arange(5001, dtype=np.float64)
        ops.all_reduce(SUM, [line[:-1]], options, out=[line[1:]])
        assert (line[1:] == np.arange(5000) * ops.size).all(), algorithm
    ops.close()


@up_to_ranks(8)
@needs_ranks(2)
def test_after_a_missed_deadline_nothing_is_computed_any_more(comm):
    ops = one_node(comm)
    options = CommunicationOptions(algorithm="hierarchical", timeout_seconds=0.05)
    ones = [np.ones(10), np.ones(3)]
    ops.all_reduce(SUM, ones, CommunicationOptions(algorithm="hierarchical"))
    ops.is_strict = False
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError):
            ops.all_reduce(SUM, ones, options)
        calls = (lambda: ops.all_reduce(SUM, ones), ops.barrier, lambda: ops.all_gather(np.ones(1)), lambda: ops.agree("x"))
        for strict in (False, True):
            ops.is_strict = strict
            for again in (*calls, lambda: ops.broadcast(np.ones(1))):
                with pytest.raises(UnavailableError, match="an earlier all_reduce did not end"):
                    again()
    comm.Barrier()
    time.sleep(0.001)


def test_means_of_small_integers_do_not_wrap_around(comm, world):
    ops = Communicator(Hierarchy(comm, world))
    for algorithm in ("flat", "hierarchical"):
        options = CommunicationOptions(algorithm=algorithm)
        [mean] = ops.all_reduce(ReduceOp.MEAN, [np.full(5, 100, np.int8)], options)
        assert mean.dtype == np.int8
        assert (mean == 100).all()
    ops.close()


@needs_ranks(2)
def test_equal_leaves_in_another_structure_do_not_agree(strategy):
    def step():
        import mpistrat

        context = mpistrat.get_replica_context()
        last = "c" if context.replica_id_in_sync_group == 1 else "b"
        return context.all_reduce("sum", {"a": np.ones(2), last: np.ones(2)})

    with pytest.raises(AgreementError, match=r"rank 1: all_reduce\(SUM\) of PyTreeSpec\(\{'a': \*, 'c': \*\}\)"):
        strategy.run(step)


@needs_ranks(2)
@pytest.mark.parametrize("wrong", ["op", "object", "axis", "ragged"])
def test_bad_input_on_one_rank_raises_on_all(strategy, wrong):
    import mpistrat

    def step():
        context = mpistrat.get_replica_context()
        bad = context.replica_id_in_sync_group == 1
        return context.all_reduce(
            "average" if bad and wrong == "op" else "sum",
            [1, [2, 3]] if bad and wrong == "ragged" else np.ones(2, object if bad and wrong == "object" else float),
        )

    def reduce_along_an_axis():
        value = strategy.run(lambda: np.ones(2 if mine else (2, 2)))
        strategy.reduce("sum", value, axis=1)

    mine = strategy.extended.communicator.rank == 1
    # only the rank that is wrong hears why; the others hear that it was
    expected = (TypeError, ValueError) if mine and wrong != "ragged" else (AgreementError, TypeError, ValueError)
    with pytest.raises(expected):
        reduce_along_an_axis() if wrong == "axis" else strategy.run(step)
    assert strategy.reduce("sum", strategy.run(lambda: np.ones(())), axis=None) == strategy.num_replicas_in_sync


@needs_ranks(2)
def test_datasets_of_another_length_are_an_error_on_every_rank(strategy):
    rows = 40 + 10 * (strategy.extended.communicator.rank == 1)
    with pytest.raises(AgreementError, match=r"(?s)rank 1: experimental_distribute_dataset\(50 rows of \[float64 \(\)\]"):
        strategy.experimental_distribute_dataset(ArrayDataset(np.arange(float(rows)), 10))
