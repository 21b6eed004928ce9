"""How many modules and functions of ours a warm call passes: what a reader has to follow, and what small calls pay for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import mpistrat

MODULES_OF_A_SMALL_ARRAY = 7
MODULES_OF_A_GRADIENT, FUNCTIONS_OF_A_GRADIENT = 12, 40

_PACKAGE = str(Path(mpistrat.__file__).parent) + os.sep
_COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"}


def passed(call):
    """Return the modules and functions of ours that a call enters, but for comprehensions and lambdas."""
    found = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and code.co_name not in _COMPREHENSIONS:
            found.add(
                (code.co_filename.removeprefix(_PACKAGE), code.co_qualname if sys.version_info >= (3, 11) else code.co_name)
            )

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted({module for module, _ in found}), sorted(found)


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


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_one_small_array_passes_few_modules(comm, monkeypatch, num_nodes):
    if comm.size != 2:
        pytest.skip("two ranks tell all")
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", "1x2" if num_nodes == 1 else "2x1")
    modules, _ = fewest_passed(comm, "sum", np.ones(1))
    assert len(modules) <= MODULES_OF_A_SMALL_ARRAY, modules


def test_a_gradient_passes_few_modules_and_functions(comm, monkeypatch):
    if comm.size != 4:
        pytest.skip("four ranks on two nodes are meant")
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", "2x2")
    modules, functions = fewest_passed(comm, "mean", [np.ones(1 << 19, np.float32)] * 2)
    assert len(modules) <= MODULES_OF_A_GRADIENT, modules
    assert len(functions) <= FUNCTIONS_OF_A_GRADIENT, functions
