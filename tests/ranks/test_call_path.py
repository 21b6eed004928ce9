"""How many modules and functions of ours a warm call passes: what a reader has to follow, and what small calls pay for."""

import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
import mpistrat.mpi4py
from mpistrat.communicator.options import CommunicationOptions
from tests.gpu import host_time, null_device
from tests.launches import on_ranks

pytestmark = on_ranks(2)

MODULES_OF_A_SMALL_ARRAY = 7
MODULES_OF_A_GRADIENT, FUNCTIONS_OF_A_GRADIENT = 14, 31
# what a call of a form makes, beside those that wait for a peer
CALLS_OF_ONE_ARRAY, CALLS_OF_ARRAYS, CALLS_OF_A_NUMBER, CALLS_OF_A_PLAN = 22, 34, 40, 110
CALLS_OF_A_WRAPPED_ARRAY, CALLS_OF_A_TYPED_BUFFER = 1, 3
# of verbs whose arrays may differ between ranks, which exchange that first; but for reduce_scatter
CALLS_OF_OTHER_VERBS = {"barrier": 10, "reduce_scatter": 40, "all_gather": 90, "broadcast": 82, "gather": 85, "all_to_all": 90}
CALLS_OF_OTHER_VERBS |= {"start, wait": 46}

# on a GPU where NCCL joins the ranks; those of all_gather and broadcast propose to do what they did last
CALLS_BY_NCCL, CALLS_OF_A_PROPOSAL, CALLS_OF_A_BATCH_BY_NCCL = 46, 76, 92

_PACKAGE = str(Path(mpistrat.__file__).parent) + os.sep
_COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"}


def entered(call):
    """Return how often a call enters each function of ours."""
    found = Counter()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            found[frame.f_code] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def passed(call):
    """Return the modules and functions of ours that a call enters, but for comprehensions and lambdas."""
    codes = [code for code in entered(call) if code.co_name not in _COMPREHENSIONS]
    functions = {(code.co_filename.removeprefix(_PACKAGE), getattr(code, "co_qualname", code.co_name)) for code in codes}
    return sorted({module for module, _ in functions}), sorted(functions)


def calls_made(call):
    """Return how many Python calls of ours a call makes, without those that poll for a late rank: more than 8 of a function."""
    return sum(count for count in entered(call).values() if count <= 8)


def forms(communicator):
    """Return every form of a call on a communicator, by name: of one array, of several, and of a number."""
    x, y, z = np.ones(3), np.empty(3), np.ones(3)
    several, results = [np.ones(2), np.ones((2, 2))], [np.empty(2), np.empty((2, 2))]
    packed = CommunicationOptions(num_packs=1)
    others, numbers = [np.ones(3, code) for code in "bHiQdFD"], [2, 1.5, 1j, np.float32(3)]
    padded, scalar, half = np.ones(4), np.ones(()), np.ones(3, np.float16)
    one = {
        "plain": lambda: communicator.all_reduce("sum", x),
        "out": lambda: communicator.all_reduce("sum", x, out=y),
        "in place": lambda: communicator.all_reduce("max", z, out=z),
        "overlapping": lambda: communicator.all_reduce("max", padded[1:], out=padded[:-1]),
        "strided": lambda: communicator.all_reduce("sum", np.ones((3, 2))[:, 0], out=y),
        "list of one, out": lambda: communicator.all_reduce("sum", [x], out=[y]),
        "mean": lambda: communicator.all_reduce("mean", x),
        "mean, out": lambda: communicator.all_reduce("mean", x, out=y),
        "mean, in place": lambda: communicator.all_reduce("mean", z, out=z),
        "scalar, in place": lambda: communicator.all_reduce("mean", scalar, out=scalar),
        "minimum": lambda: communicator.all_reduce("min", z, out=z),
        "product": lambda: communicator.all_reduce("prod", x),
        **{repr(each): lambda each=each: communicator.all_reduce("sum", each) for each in others},
    }
    wanted = {"algorithm": "flat", "num_packs": 1, "bytes_per_pack": 1 << 20, "timeout_seconds": 9.0, "wire_dtype": "bfloat16"}
    for name, value in wanted.items():
        options = CommunicationOptions(**{name: value})
        one[name] = lambda options=options: communicator.all_reduce("sum", x, options)
        one[f"{name}, in place"] = lambda options=options: communicator.all_reduce("max", z, options, z)
    more = {
        "several": lambda: communicator.all_reduce("sum", several),
        "several, out": lambda: communicator.all_reduce("sum", several, out=results),
        "several, in place": lambda: communicator.all_reduce("max", several, out=several),
        "several, mean, out": lambda: communicator.all_reduce("mean", several, out=results),
        "halves": lambda: communicator.all_reduce("mean", half, out=half),
        "num_packs": lambda: communicator.all_reduce("sum", several, packed, results),
    }
    return one, more, {repr(each): lambda each=each: communicator.all_reduce("sum", each) for each in numbers}


def fewest_passed(comm, op, value):
    """Return what a warm call of ``ctx.all_reduce`` passes where it waits least. A collective call."""
    found = []

    def step():
        context = mpistrat.get_replica_context()
        for _ in range(32):  # a rank that waits long checks its peers
            found.append(passed(lambda: context.all_reduce(op, value)))

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    strategy.run(step)
    strategy.close()
    modules, functions = min(found, key=lambda each: len(each[1]))
    print(len(modules), len(functions), *functions, sep="\n")
    return modules, functions


def test_one_small_array_passes_few_modules(comm, monkeypatch, shape):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    modules, _ = fewest_passed(comm, "sum", np.ones(1))
    assert len(modules) <= MODULES_OF_A_SMALL_ARRAY, modules


@pytest.mark.ranks(nodes="2x2")
def test_a_gradient_passes_few_modules_and_functions(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    monkeypatch.setattr("mpistrat.steps._LOOK_SECONDS", 60.0)  # on a busy machine every call waits long enough to look
    modules, functions = fewest_passed(comm, "mean", [np.ones(1 << 19, np.float32)] * 2)
    assert len(modules) <= MODULES_OF_A_GRADIENT, modules
    assert len(functions) <= FUNCTIONS_OF_A_GRADIENT, functions


@pytest.mark.parametrize("strict", ["0", "1"])
def test_every_form_of_a_call_is_fast_the_second_time(comm, monkeypatch, shape, strict):
    monkeypatch.setenv("MPISTRAT_STRICT", strict)
    communicator = mpistrat.Communicator(comm)
    for most, calls in zip((CALLS_OF_ONE_ARRAY, CALLS_OF_ARRAYS, CALLS_OF_A_NUMBER), forms(communicator), strict=True):
        for name, call in calls.items():
            call()
            fewest = min(calls_made(call) for _ in range(64))  # a rank that waits long checks its peers
            assert fewest <= most, name
    communicator.close()


def test_other_verbs_make_few_calls(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    communicator = mpistrat.Communicator(comm)
    x, y, whole = np.ones(2), np.empty(2), np.ones(4)
    calls = {
        "start, wait": lambda: communicator.start_all_reduce("sum", x).wait(),
        "barrier": communicator.barrier,
        "reduce_scatter": lambda: communicator.reduce_scatter("sum", whole, out=y),
        "all_gather": lambda: communicator.all_gather(x, out=whole),
        "broadcast": lambda: communicator.broadcast(x, out=y),
        "gather": lambda: communicator.gather(x),
        "all_to_all": lambda: communicator.all_to_all([x, y]),
    }
    for verb, call in calls.items():
        call()
        made = min(calls_made(call) for _ in range(32))
        print(verb, made)
        assert made <= CALLS_OF_OTHER_VERBS[verb], verb
    communicator.close()


OPS = [
    *(mpistrat.HierarchicalAllReduce(), mpistrat.HierarchicalAllReduce(num_packs=1)),
    *(mpistrat.CollectiveAllReduce(), mpistrat.HierarchicalCopyAllReduce()),
]


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: type(ops).__name__)
def test_every_form_of_a_call_of_replicas_is_fast_the_second_time(comm, monkeypatch, ops):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ops)
    x, y = np.ones(3), np.empty(3)
    nest, out = {"a": np.ones(2), "b": [np.ones(3)]}, {"a": np.ones(2), "b": [np.ones(3)]}
    options = CommunicationOptions(bytes_per_pack=1 << 20)

    def step():
        context = mpistrat.get_replica_context()
        one = [
            lambda: context.all_reduce("sum", x),
            lambda: context.all_reduce("sum", x, out=y),
            lambda: context.all_reduce("mean", y, out=y),
            lambda: context.all_reduce("sum", x, options),
        ]
        several = [
            lambda: context.all_reduce("sum", nest),
            lambda: context.all_reduce("mean", nest, out=out),
            lambda: context.all_reduce("max", nest, options, out=nest),
        ]
        return [[(call(), min(calls_made(call) for _ in range(32)))[1] for call in calls] for calls in (one, several)]

    one, several = (strategy.local(found) for found in strategy.run(step))
    strategy.close()
    is_one_call = type(ops) is not mpistrat.HierarchicalCopyAllReduce
    assert max(one) <= (CALLS_OF_ONE_ARRAY if is_one_call else CALLS_OF_A_PLAN)
    assert max(several) <= (CALLS_OF_ARRAYS if is_one_call else CALLS_OF_A_PLAN)


def test_small_sums_of_a_wrapped_communicator_go_straight_to_mpi(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    wrapped = mpistrat.mpi4py.wrap(comm)
    x, y = np.ones(1), np.empty(1)
    calls = [lambda: wrapped.Allreduce(x, y), lambda: wrapped.Allreduce(MPI.IN_PLACE, y)]
    typed = [lambda: wrapped.Allreduce([x, MPI.DOUBLE], [y, 1, MPI.DOUBLE]), lambda: wrapped.Allreduce(None, (y, MPI.DOUBLE))]
    for call in calls + typed:
        call()
        most = CALLS_OF_A_WRAPPED_ARRAY if call in calls else CALLS_OF_A_TYPED_BUFFER
        assert min(calls_made(call) for _ in range(8)) <= most
    wrapped._communicator.close()


def test_a_warm_call_by_nccl_makes_few_calls(comm, monkeypatch):
    """On a GPU that does nothing; `tests.gpu.host_time` measures their time."""
    pytest.importorskip("cupy")
    monkeypatch.setenv("MPISTRAT_ALLOW_SHARED_GPU", "1")
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    made = {}
    with null_device.bound(comm.size) as device, mpistrat.Communicator(comm) as communicator:
        for name, call in host_time.calls(communicator, device).items():
            for _ in range(host_time.SHAPES):
                call()
            made[name] = min(calls_made(call) for _ in range(32))
    print(made)
    proposed = dict.fromkeys(["all_gather", "all_gather, along axis 1", "broadcast"], CALLS_OF_A_PROPOSAL)
    most = {**proposed, "start_all_reduce, wait": 116}
    for name, count in made.items():
        calls = most.get(name, CALLS_OF_A_BATCH_BY_NCCL if "arrays" in name else CALLS_BY_NCCL)
        assert count <= calls + 20 * ("along" in name), name  # NumPy's function that moves an axis has some itself
