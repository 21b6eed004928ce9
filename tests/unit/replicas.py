"""Replicas without MPI: a program is run for each of them in turn, again and again, one collective further each time.

A collective that not all replicas have entered yet stops the program of this replica; once all have, its result is known
and the programs are run again. Programs must therefore do the same each time.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrat
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.validate import check_gather
from mpistrat.context.values import select_replica
from mpistrat.execution.engine import Work
from mpistrat.reduction import ReduceOp, check_dtype, combine, divide
from mpistrat.timeline import Timeline
from mpistrat.topology.world import World


def on_replicas(num_replicas: int, program: Callable[[mpistrat.Strategy], Any]) -> list[Any]:
    """Return what ``program(strategy)`` returns on each replica."""
    known: list[Any] = []
    while True:
        reached: list[_Reached] = []
        results = []
        for replica in range(num_replicas):
            strategy = mpistrat.Strategy(mpistrat.StrategyExtended(_ReplayedOps(replica, num_replicas, known)))
            try:
                results.append(program(strategy))
            except _Reached as collective:
                reached.append(collective)
        if not reached:
            return results
        assert len(reached) == num_replicas, "replicas made different numbers of collective calls"
        assert len({collective.call for collective in reached}) == 1, [collective.call for collective in reached]
        known.append(reached[0].finish([collective.contribution for collective in reached]))


IN_REPLICA: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda context: context.all_reduce("sum", 3.0),
    "start_all_reduce": lambda context: context.start_all_reduce("sum", 3.0).wait(),
    "all_gather": lambda context: context.all_gather(np.array([3.0]), axis=0),
    "broadcast": lambda context: context.broadcast(3.0),
    "reduce_scatter": lambda context: context.reduce_scatter("sum", np.array([3.0])),
    "all_to_all": lambda context: context.all_to_all([3.0])[0],
    "sum_of_parts": lambda context: context.sum_of_parts(np.sum, np.array([3.0]), 1),
    "barrier": lambda context: context.barrier() or 3.0,
}
"""Each collective of a replica context, which is 3 with a single replica."""


def in_run(fn: Callable[[Any, int], Any], num_replicas: int = 2) -> list[Any]:
    """Return what ``fn(context, replica)`` returns on each replica."""

    def step() -> Any:
        context = mpistrat.get_replica_context()
        return fn(context, context.replica_id_in_sync_group)

    return on_replicas(num_replicas, lambda strategy: select_replica(strategy.run(step)))


class _Reached(BaseException):
    def __init__(self, call: str, contribution: Any, finish: Callable[[list[Any]], Any]) -> None:
        self.call, self.contribution, self.finish = call, contribution, finish


class _ReplayedOps(BaseCommunicator):
    def __init__(self, rank: int, size: int, known: list[Any]) -> None:
        self.world = World.from_shape(f"1x{size}")
        self.rank, self.size, self.timeline = rank, size, Timeline()
        self._known, self._next = known, 0

    @property
    def num_collectives(self):
        return self._next

    def _meet(self, call: str, contribution: Any, finish: Callable[[list[Any]], Any]) -> Any:
        if self._next == len(self._known):
            raise _Reached(call, contribution, finish)
        self._next += 1
        return self._known[self._next - 1]

    def all_reduce(self, op, arrays, options=None, out=None):
        for index, array in enumerate(arrays):
            check_dtype(op, array.dtype, f"array {index}")
        call = f"all_reduce {op} {[(array.shape, array.dtype) for array in arrays]}"

        def finish(contributions):
            return [_reduced(op, parts) for parts in zip(*contributions, strict=True)]

        return [total.copy() for total in self._meet(call, list(arrays), finish)]

    def start_all_reduce(self, op, arrays, options=None, out=None, structure=None):
        return Work.ended(self.all_reduce(op, arrays, options, out))

    def reduce_scatter(self, op, array, axis=0, options=None):
        return np.array_split(self.all_reduce(op, [array], options)[0], self.size, axis)[self.rank]

    def gather(self, array, root=0, options=None):
        parts = self._meet(f"gather {root}", array, list)
        return [part.copy() for part in parts] if self.rank == root else None

    def gather_objects(self, value, root=0):
        found = self._meet(f"gather_objects {root}", value, list)
        return found if self.rank == root else None

    def all_gather(self, array, axis=0, options=None):
        check_gather(array, axis)
        return self._meet(f"all_gather {axis}", array, lambda parts: np.concatenate(parts, axis)).copy()

    def broadcast(self, array, root=0, options=None):
        return self._meet(f"broadcast {root}", array, lambda parts: parts[root]).copy()

    def agree(self, call, error=None, options=None):
        texts = self._meet("agree", call if error is None else f"{call}, which failed: {error!r}", list)
        if error is not None:
            raise error
        if len(set(texts)) > 1:
            raise mpistrat.errors.AgreementError(f"ranks made different calls: {texts}")


def _reduced(op: ReduceOp, parts: tuple[Any, ...]) -> Any:
    total = parts[0].copy()
    for part in parts[1:]:
        total = np.asarray(combine(op)(total, part))
    if op is ReduceOp.MEAN:
        divide(total, len(parts), total)
    return total
