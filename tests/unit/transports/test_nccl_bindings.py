"""Which binding of NCCL is taken, and what nccl4py is called by."""

import inspect
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest

from mpistrat.transports import nccl_bindings
from mpistrat.transports.nccl_bindings import Nccl4py, find_binding, nccl4py_refusal
from tests.gpu.fake_nccl4py import DataType, FakeNccl4py, RedOp, UniqueId, modules


@pytest.fixture
def cupy(monkeypatch):
    """Let CuPy find an NCCL, and nccl4py the same."""
    cupy = SimpleNamespace(available=True, get_version=lambda: 23007)
    monkeypatch.setattr(nccl_bindings, "cupy_binding", lambda: cupy)
    monkeypatch.setitem(nccl_bindings.BINDINGS, "CuPy", lambda: cupy)
    found = modules(Mock(get_version=lambda: 23007))
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    find_binding.cache_clear()
    yield cupy
    find_binding.cache_clear()


def test_nccl4py_is_taken_where_it_finds_the_nccl_of_cupy(cupy):
    assert not nccl4py_refusal()
    assert isinstance(find_binding(), Nccl4py)


def test_nccl4py_is_taken_where_cupy_finds_no_nccl(cupy):
    cupy.available, cupy.get_version = False, None
    assert isinstance(find_binding(), Nccl4py)


def test_cupy_is_taken_where_nccl4py_finds_another_nccl(cupy):
    cupy.get_version = lambda: 22809
    assert nccl4py_refusal() == "it finds NCCL 2.30.7, and CuPy 2.28.9"
    assert find_binding() is cupy


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (None, "ModuleNotFoundError: "),
        (ModuleType("nccl.bindings"), "ImportError: cannot import name 'nccl'"),
        (SimpleNamespace(nccl=FakeNccl4py(Mock(get_version=Mock(side_effect=RuntimeError("no libnccl"))))), "no libnccl"),
    ],
    ids=["not installed", "another package of that name", "no libnccl"],
)
def test_cupy_is_taken_where_nccl4py_cannot_be_used(cupy, monkeypatch, module, why):
    monkeypatch.setitem(sys.modules, "nccl.bindings", module)
    monkeypatch.delitem(sys.modules, "nccl.bindings.nccl")
    assert why in nccl4py_refusal()
    assert find_binding() is cupy


def test_the_fake_of_nccl4py_has_its_names_arguments_and_numbers():
    real, fake = pytest.importorskip("nccl.bindings.nccl"), FakeNccl4py(Mock())
    for name in (name for name, call in vars(FakeNccl4py).items() if inspect.isfunction(call) and not name.startswith("_")):
        assert list(inspect.signature(getattr(real, name)).parameters) == list(
            inspect.signature(getattr(fake, name)).parameters
        ), name
    for ours, theirs in ((DataType, real.DataType), (RedOp, real.RedOp)):
        assert {name: int(theirs[name]) for name in ours.__members__} == ours.__members__
    identifier = real.UniqueId.from_buffer(bytearray(range(128)))
    assert bytes(identifier) == bytes(UniqueId.from_buffer(bytearray(range(128)))) == bytes(range(128))
    assert issubclass(real.NCCLError, Exception)
