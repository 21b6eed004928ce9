"""Cases: what a random program does on a communicator or a wrapped communicator, and what must come of it."""

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

import mpistrat
import mpistrat.mpi4py
from mpistrat import settings
from mpistrat.algorithms.planners import PLANNERS
from mpistrat.experimental import CommunicationOptions
from tests.fuzz.operands import OPS, VERBS, Operand, Operands, draw_targets, is_refused, overlaps, told
from tests.fuzz.strategy_cases import make_strategy, play_strategy, play_variable
from tests.reference import UFUNCS, of_verb

_MOST_REPEATS = 3


class Field:
    """What the cases of a job are played on: the ranks, and the objects that cases share."""

    def __init__(self, comm: MPI.Intracomm, seed: int) -> None:
        self.comm, self.seed = comm, seed
        self.strategy: Any = mpistrat.MultiWorkerMirroredStrategy()
        self.communicator = mpistrat.Communicator(comm)
        self._halves = comm.Split(comm.rank % 2, comm.rank)
        self.half = mpistrat.Communicator(self._halves)
        self.wrapped = mpistrat.mpi4py.wrap(comm)
        self.algorithms = {communicator: ["auto", *PLANNERS] for communicator in (self.communicator, self.half)}
        self.note = ""
        is_usable = settings.ALGORITHM.read() in ("auto", *self.algorithms[self.half])
        self._is_half_usable = comm.allreduce(is_usable, MPI.LAND)  # the halves of an odd number of ranks differ

    def play(self, number: int, evenly: bool = False) -> None:
        """Play a case, each kind in turn or at random; raise AssertionError if something is wrong."""
        rng = np.random.default_rng((self.seed, number))
        act = _ACTS[number % NUM_KINDS if evenly else rng.choice(len(_ACTS), p=_WEIGHTS)]
        self.note = act.__name__
        run = act(self, rng)
        if rng.random() < 0.1:
            _on_a_thread(run)
        else:
            run()
        if rng.integers(self.comm.size * 8) == self.comm.rank:
            gc.collect()  # on one rank alone, now and then

    def close(self) -> None:
        if self.wrapped._communicator is not None:
            self.wrapped._communicator.close()
        self.half.close()
        self.communicator.close()
        self.strategy.close()
        self._halves.Free()

    def pick(self, rng: np.random.Generator) -> Any:
        return self.half if rng.random() < 0.15 and self._is_half_usable else self.communicator

    def options(self, rng: np.random.Generator, communicator: Any) -> CommunicationOptions | None:
        kind = rng.random()
        if kind < 0.6:
            return None
        known = self.algorithms.get(communicator, ["auto"])
        algorithm = str(known[rng.integers(len(known))])
        if kind < 0.65:
            return CommunicationOptions(num_packs=int(rng.integers(4)))
        if kind < 0.8:
            return CommunicationOptions(algorithm=algorithm, bytes_per_pack=int(rng.choice([0, 1, 24, 500, 10**6])))
        if kind < 0.87:
            return CommunicationOptions(deterministic=True)
        if kind < 0.94:
            wire = str(rng.choice(["bfloat16", "float16"]))
            return CommunicationOptions(wire_dtype=wire, algorithm="hierarchical") if "hierarchical" in known else None
        return CommunicationOptions(timeout_seconds=120.0)


def _on_a_thread(run: Callable[[], None], meanwhile: Callable[[], None] = lambda: None) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    meanwhile()
    thread.join()
    if errors:
        raise errors[0]


def _must_refuse(call: Callable[[], Any], why: str) -> None:
    try:
        found = call()
    except mpistrat.errors.MpistratError:
        return
    raise AssertionError(f"{why} was accepted: {found!r}")


def _call(name: str) -> Callable[[Field, np.random.Generator], Callable[[], None]]:
    def act(field: Field, rng: np.random.Generator) -> Callable[[], None]:
        communicator, verb = field.pick(rng), VERBS[name]
        size, rank = communicator.size, communicator.rank
        op = str(rng.choice(OPS)) if verb.reduces else "MAX"
        operands = Operands(rng, op, rank)
        place = {"": None, "axis": int(rng.integers(-2, 2)), "root": int(rng.integers(size))}[verb.place]
        has_axis = verb.place != "axis" or all(-len(operand.shape) <= place < len(operand.shape) for operand in operands)
        if name == "all_gather" and has_axis:
            operands.stretch(place, [int(length) for length in rng.integers(0, 5, size)])
        options, repeats = field.options(rng, communicator), int(rng.integers(1, _MOST_REPEATS + 1))
        is_started, reshapes = name != "broadcast" and rng.random() < 0.15, name == "all_reduce" and rng.random() < 0.1
        is_exact = not verb.reduces or rng.random() < 0.7 or bool(options and options.wire_dtype)
        if not is_exact:
            operands.be_inexact()
        kind, targets, refused = "none", None, not has_axis
        if has_axis:
            shapes = [operand.after(name, place, size, rank)[0].shape for operand in operands]
            kind, targets = draw_targets(rng, operands, shapes, verb.targets)
            refused = is_refused(targets, operands, shapes)
        if name == "broadcast" and refused and kind not in ("read-only", "strided", "unaligned"):
            targets, refused = None, False  # the root alone would refuse these
        field.note = f"{name} {op} {operands} {place} out={kind} {told(options)} x{repeats} started={is_started}"

        def call() -> Any:
            given = (*[op] * verb.reduces, operands.passed(), *[place] * bool(verb.place), options)
            out = None if targets is None else operands.passed(targets)
            if is_started:
                return getattr(communicator, f"start_{name}")(*given, out).wait()
            return getattr(communicator, name)(*given, out)

        def look(results: list[Any], before: list[bytes]) -> None:
            for operand, result in zip(operands, results, strict=True):
                operand.check(result, size, name, place, rank)
            if targets is not None:
                assert all(result is target for result, target in zip(results, targets, strict=True)), "not out"
            else:
                assert not any(overlaps(np.asarray(operand.array), results) for operand in operands), "a view came back"
            operands.check_unchanged(before, targets)

        def run() -> None:
            wrong: AssertionError | None = None
            for repeat in range(repeats):
                if repeat:
                    operands.renew()
                if reshapes and repeat and targets is None:
                    _reshape(operands)
                if refused:
                    _must_refuse(call, field.note)
                    continue
                before = operands.snapshot()
                results = operands.results(call())
                try:
                    look(results, before)
                except AssertionError as error:
                    wrong = error  # raised when the ranks whose results are right have made all calls too
                if not is_exact and name == "all_reduce":
                    _must_be_equal_on_all_ranks(communicator, results)
            if wrong:
                raise wrong

        return run

    act.__name__ = name
    return act


def _must_be_equal_on_all_ranks(communicator: Any, results: Sequence[np.ndarray]) -> None:
    bits = np.array(crc32(b"".join(np.asarray(each).tobytes() for each in results if each.dtype.kind != "c")))
    assert communicator.all_reduce("max", bits) == bits == communicator.all_reduce("min", bits), "ranks differ"


def _reshape(operands: Sequence[Operand]) -> None:
    """Give arrays another shape in place."""
    for operand in operands:
        if operand.layout == "C" and operand.array.size:
            operand.shape = (1, *operand.shape)
            operand.array.resize(operand.shape, refcheck=False)


def _several_started(field: Field, rng: np.random.Generator) -> Callable[[], None]:
    communicator = field.communicator
    operations = []
    for _ in range(int(rng.integers(2, 5))):
        op = str(rng.choice(OPS))
        operations.append((op, Operands(rng, op, communicator.rank), field.options(rng, communicator)))
    order = np.random.default_rng((int(rng.integers(2**31)), communicator.rank)).permutation(len(operations))
    waits = rng.random() < 0.8
    field.note = f"started {[(op, each, told(options)) for op, each, options in operations]} waits={waits}"

    def run() -> None:
        works = [communicator.start_all_reduce(op, operands.passed(), options) for op, operands, options in operations]
        assert (communicator.all_reduce("sum", np.ones(3)) == communicator.size).all()
        for index in order if waits else order[:1]:
            _, operands, _ = operations[index]
            for operand, result in zip(operands, operands.results(works[index].wait()), strict=True):
                operand.check(result, communicator.size)

    return run


def _exchange(field: Field, rng: np.random.Generator) -> Callable[[], None]:
    communicator = field.pick(rng)
    operand = Operand(rng, "MAX", communicator.rank)
    root, options, size = int(rng.integers(communicator.size)), field.options(rng, communicator), communicator.size
    verb = str(rng.choice(["gather", "all_to_all", "all_to_all_parts", "barrier", "objects"]))
    field.note = f"{verb} {operand} root={root} {told(options)}"

    def run() -> None:
        before, mine = operand.snapshot(), operand.array
        if verb == "barrier":
            communicator.barrier(options)
        elif verb == "objects":
            assert communicator.broadcast_object((communicator.rank, root), root) == (root, root)
            gathered = communicator.gather_objects(str(communicator.rank), root)
            assert gathered == (list(map(str, range(size))) if communicator.rank == root else None)
        elif verb == "gather":
            found = communicator.gather(mine, root, options)
            assert (found is None) == (communicator.rank != root)
            for rank, result in enumerate(found or ()):
                assert np.asarray(result).tobytes() == np.asarray(operand.part(rank)).tobytes()
        elif verb == "all_to_all":
            received = communicator.all_to_all([mine] * size, options)
            for rank, result in enumerate(received):
                assert np.asarray(result).tobytes() == np.asarray(operand.part(rank)).tobytes()
        elif not operand.shape:
            _must_refuse(lambda: communicator.all_to_all(mine, options), field.note)
        else:
            parts = [np.asarray(operand.part(rank)) for rank in range(size)]
            wanted, _ = of_verb("all_to_all", parts, None, communicator.rank)
            assert communicator.all_to_all(mine, options).tobytes() == wanted.tobytes()
        assert operand.snapshot() == before, f"an argument was changed: {operand}"

    return run


def _state(field: Field, rng: np.random.Generator) -> Callable[[], None]:
    num_packs, is_strict = [None, 0, 1, 3][rng.integers(4)], bool(rng.random() < 0.3)
    kind = str(rng.choice(["strict", "confirm", "remake", "remake", "drop", "mpi"]))
    is_collector = rng.integers(field.comm.size) == field.comm.rank
    field.note = f"state {kind} {num_packs} {is_strict}"

    def run() -> None:
        if kind == "strict":
            field.communicator.is_strict = is_strict
        elif kind == "confirm":
            field.communicator.confirm()
        elif kind == "mpi":
            assert field.comm.allreduce(1) == field.comm.size  # the program's own messages
        else:
            known = field.algorithms.pop(field.communicator)
            if kind == "remake":
                field.communicator.close()
            field.communicator = mpistrat.Communicator(field.comm, CommunicationOptions(num_packs=num_packs))
            field.algorithms[field.communicator] = known
            if is_collector:
                gc.collect()

    return run


def _strategy_state(field: Field, rng: np.random.Generator) -> Callable[[], None]:
    kind, is_collector = str(rng.choice(["remake", "drop", "report"])), rng.integers(field.comm.size) == field.comm.rank
    make = make_strategy(rng, field.communicator.world.num_nodes == 1)
    field.note = f"strategy {kind}"

    def run() -> None:
        if kind == "report":
            assert field.strategy.memory_report().total_bytes >= 0
            assert field.communicator.memory_report().total_bytes >= 0
            return
        if kind == "remake":
            field.strategy.close()
        field.strategy = make()
        if is_collector:
            gc.collect()

    return run


def _beside(field: Field, rng: np.random.Generator) -> Callable[[], None]:
    """Make calls on two threads beside each other, each on a communicator of its own."""
    counts = [int(count) for count in rng.integers(1, 5000, int(rng.integers(1, 6)))]
    wanted = sum(range(1, field.comm.size + 1))
    field.note = f"beside {counts}"

    def bare() -> None:
        for count in counts:
            assert (field.communicator.all_reduce("sum", np.full(count, field.comm.rank + 1.0)) == wanted).all()

    def wrapped() -> None:
        for count in reversed(counts):
            target = np.full(count, field.comm.rank + 1.0)
            field.wrapped.Allreduce(MPI.IN_PLACE, target)
            assert (target == wanted).all()

    return lambda: _on_a_thread(wrapped, bare)


_MPI_OPS = {"SUM": MPI.SUM, "PROD": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}


def _wrapped(field: Field, rng: np.random.Generator) -> Callable[[], None]:
    comm, size, rank = field.wrapped, field.comm.size, field.comm.rank
    op = str(rng.choice(sorted(_MPI_OPS)))
    verbs = ["Allreduce", "typed", "in place", "Bcast", "Allgather", "Reduce_scatter_block", "allreduce", "Iallreduce", "Split"]
    verb = str(rng.choice(verbs))
    dtype = np.dtype(str(rng.choice(["f4", "f8", "i4", "i8", "c16" if op in ("SUM", "PROD") else "f8"])))
    count, repeats = int(rng.integers(1, 5000)), int(rng.integers(1, 4))
    seed, root = int(rng.integers(2**31)), int(rng.integers(size))
    field.note = f"wrapped {verb} {op} {dtype} {count} x{repeats}"

    def part(of: int, repeat: int) -> np.ndarray:
        values = np.random.default_rng((seed, of, repeat)).integers(1, 3, count)
        return values.astype(dtype)

    def combined(repeat: int) -> np.ndarray:
        total = part(0, repeat)
        for other in range(1, size):
            total = UFUNCS[op](total, part(other, repeat))
        return total

    def run() -> None:
        source, target = np.empty(count, dtype), np.empty(count, dtype)
        for repeat in range(repeats):
            source[...] = part(rank, repeat)
            if verb == "Allreduce":
                comm.Allreduce(source, target, _MPI_OPS[op])
            elif verb == "typed":
                datatype = MPI.Datatype.fromcode(dtype.char)
                comm.Allreduce([source, datatype], [target, count, datatype], _MPI_OPS[op])
            elif verb == "Split":
                part_of_it = comm.Split(0, -rank)
                part_of_it.Allreduce(source, target, _MPI_OPS[op])
                part_of_it.Free()
            elif verb == "Iallreduce":
                others = source.copy()
                requests = [comm.Iallreduce(source, target, _MPI_OPS[op]), comm.Iallreduce(MPI.IN_PLACE, others, _MPI_OPS[op])]
                MPI.Request.Waitall(requests)
                assert np.array_equal(others, combined(repeat))
            elif verb == "in place":
                target[...] = source
                comm.Allreduce(MPI.IN_PLACE, target, _MPI_OPS[op])
            elif verb == "allreduce":
                assert comm.allreduce(rank + repeat) == sum(range(size)) + size * repeat
                continue
            elif verb == "Bcast":
                comm.Bcast(source, root)
                assert np.array_equal(source, part(root, repeat))
                continue
            elif verb == "Allgather":
                whole = np.empty((size, count), dtype)
                comm.Allgather(source, whole)
                assert np.array_equal(whole, [part(other, repeat) for other in range(size)])
                continue
            else:
                comm.Reduce_scatter_block(np.repeat(source[None], size, 0), target, _MPI_OPS[op])
            assert np.array_equal(target, combined(repeat)), (target, combined(repeat))

    return run


_CHANCES = {
    _call("all_reduce"): 40,
    _several_started: 8,
    _call("reduce_scatter"): 10,
    _call("all_gather"): 8,
    _call("broadcast"): 8,
    _exchange: 8,
    _state: 4,
    _beside: 3,
    _strategy_state: 2,
    play_strategy: 12,
    play_variable: 3,
    _wrapped: 10,
}
_ACTS = list(_CHANCES)
NUM_KINDS = len(_ACTS)
_WEIGHTS = np.array(list(_CHANCES.values())) / sum(_CHANCES.values())
