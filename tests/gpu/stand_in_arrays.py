"""A stand-in for CuPy: arrays in the memory of a stand-in device, and the namespace that makes them.

They behave as CuPy's where that matters: no arrays of NumPy, not read by NumPy unless asked to (``get``), computed with by
NumPy's functions and operators, which refuse arrays of the host beside them, and by no value that is neither. Assignments are
put on the current stream. Whatever else reads or writes an array happens at once, after all that is there: what was to come
before, and was left on another stream, is missing from the result. New memory holds rubbish, or what an array has left there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import optree

from mpistrat.device.binding import bind, bound_device
from tests.gpu.stand_in import StandInArray, StandInDevice

_SCALARS = (bool, int, float, complex, np.generic)
_VIEWS = (int, np.integer, slice, type(None), type(Ellipsis))
_LOOKS = {np.moveaxis, np.array_split, np.may_share_memory}
"""Functions that read no element."""


@contextmanager
def stand_in_gpu(seed: int = 0, index: int = 0) -> Iterator[StandInDevice]:
    """Let this process compute on a stand-in device for a while."""
    device = StandInDevice(seed, index)
    device.namespace = Namespace(device)
    bind(device)
    try:
        yield device
    finally:
        bind(None)
        device.close()


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801 - CuPy's name
    __array_priority__ = 100

    def __init__(self, memory: Any, on: StandInDevice) -> None:
        self._memory, self._on = memory, on

    def __del__(self) -> None:
        owner = self._memory
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if owner.flags.owndata:  # it is not of the pool: NumPy would give it back to the system
            self._on.keep(owner)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self._on.index)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self._memory.ctypes.data if self._memory.size else 0, device_id=self._on.index)

    @property
    def flags(self) -> Any:
        flags = self._memory.flags
        return SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, owndata=flags.owndata)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        memory = self._memory
        strides = None if memory.flags.c_contiguous else memory.strides
        data = self.data.ptr, False
        return {"shape": memory.shape, "typestr": memory.dtype.str, "data": data, "version": 3, "strides": strides}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        targets = kwargs.get("out", ())
        if not all(isinstance(value, (ndarray, np.ndarray, *_SCALARS)) for value in (*inputs, *targets)):
            return NotImplemented
        return self._compute(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not all(issubclass(kind, (ndarray, np.ndarray)) for kind in types):
            return NotImplemented
        return self._compute(func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the shape, dtype, … or a method of the array that NumPy has too."""
        if name.startswith("_") or name in ("ctypes", "tobytes", "setflags"):
            raise AttributeError(f"an array on a stand-in device has no {name}")
        found = getattr(self._memory, name)
        if callable(found):
            return lambda *args, **kwargs: self._compute(getattr(np.ndarray, name), (self, *args), kwargs)
        return self._like(found) if isinstance(found, np.ndarray) else found

    def get(self) -> Any:
        return self._settled().copy()

    def tolist(self) -> Any:
        return self.get().tolist()

    def item(self) -> Any:
        return self.get().item()

    def astype(self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True) -> Any:
        if casting is not None or subok is not None:
            raise TypeError("casting is not supported yet")  # nor subok, by CuPy 14
        if not copy and self.dtype == dtype and order == "C" and self.flags.c_contiguous:
            return self
        return self._compute(np.ndarray.astype, (self, dtype), {"order": order, "copy": copy})

    def view(self, dtype: Any = None) -> ndarray:
        return self._like(self._memory.view(self.dtype if dtype is None else dtype))

    def reshape(self, *shape: Any) -> ndarray:
        if not self._memory.flags.c_contiguous:
            self._settle()  # copies
        return self._like(self._memory.reshape(*shape))

    def __getitem__(self, key: Any) -> ndarray:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, _VIEWS) for part in parts):
            self._settle()
        # an element is an array of no axes
        more = () if Ellipsis in [part for part in parts if isinstance(part, _VIEWS)] else (Ellipsis,)
        return self._like(self._memory[tuple(map(_raw, parts)) + more])

    def __setitem__(self, key: Any, value: Any) -> None:
        _check([value])
        at = optree.tree_map(_raw, key) if isinstance(key, tuple) else _raw(key)
        parts = key if isinstance(key, tuple) else (key,)
        if isinstance(value, ndarray) and all(isinstance(part, (slice, type(Ellipsis))) for part in parts):
            _assign(self._on, self._memory[at], value._memory)
        else:
            self._settled()[at] = _raw(value)

    def __len__(self) -> int:
        return len(self._memory)

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __repr__(self) -> str:
        return repr(self.get())

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def __reduce__(self) -> Any:
        return _remade, (self.get(),)

    def _compute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return _compute(self._on, function, args, kwargs)

    def _like(self, memory: Any) -> ndarray:
        return ndarray(memory, self._on)

    def _settle(self) -> None:
        event = self._on.current_stream().record()
        while not event.done():
            pass

    def _settled(self) -> Any:
        self._settle()
        return self._memory


def _strict(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    """Return an operator in place, which leaves nothing to the other operand."""

    def operate(self: ndarray, other: Any) -> ndarray:
        _check([other])
        ufunc(self, other, out=self)
        return self

    return operate


for _kind in (float, int, complex, bool):
    setattr(ndarray, f"__{_kind.__name__}__", lambda self, kind=_kind: kind(self.item()))
for _name in ("add", "sub", "mul", "truediv", "matmul"):
    _ufunc = {"sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide}.get(_name) or getattr(np, _name)
    setattr(ndarray, f"__i{_name}__", _strict(_ufunc))


class Namespace(ModuleType):
    """What stands for the module ``cupy`` on a stand-in device: what it does not define is made of NumPy's functions."""

    ndarray = ndarray

    def __init__(self, device: StandInDevice) -> None:
        super().__init__("stand_in_for_cupy")
        self._on = device

    def asarray(self, value: Any, dtype: Any = None) -> ndarray:
        if isinstance(value, ndarray):
            return value if dtype is None else value.astype(dtype, copy=False)
        if isinstance(value, StandInArray):  # of `Device.allocate`, whose memory CuPy's array would own
            return ndarray(value.view(np.ndarray), self._on)
        if hasattr(value, "__cuda_array_interface__"):
            return ndarray(_mapped(**value.__cuda_array_interface__), self._on)
        return _new(np.array(value, dtype), self._on)

    def array(self, value: Any, dtype: Any = None) -> ndarray:
        made = self.asarray(value, dtype)
        return made.copy() if made is value else made

    def from_dlpack(self, value: Any) -> ndarray:
        return value.on_stand_in(self._on)

    def empty(self, shape: Any, dtype: Any = np.float64) -> ndarray:
        return ndarray(_lent(shape, np.dtype(dtype), self._on)[0], self._on)

    def empty_like(self, value: ndarray, dtype: Any = None) -> ndarray:
        return self.empty(value.shape, value.dtype if dtype is None else dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            return found
        return lambda *args, **kwargs: _compute(self._on, found, args, kwargs)


def _compute(device: StandInDevice, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of NumPy with the memory of arrays, and return its arrays as arrays on the device."""
    _check(optree.tree_leaves((list(args), kwargs)))
    if function is np.copyto and isinstance(args[1], ndarray):
        _assign(device, args[0]._memory, args[1]._memory)
        return None
    if function not in _LOOKS:
        event = device.current_stream().record()
        while not event.done():
            pass
    with np.errstate(all="ignore"):  # nobody warns on a GPU
        result = function(*optree.tree_map(_raw, list(args)), **optree.tree_map(_raw, kwargs))
    if function is np.copyto or result is None:
        return None
    written = [value for value in optree.tree_leaves(kwargs.get("out")) if isinstance(value, ndarray)]
    return written[0] if written else optree.tree_map(lambda leaf: _wrapped(leaf, device), result)


def _assign(device: StandInDevice, target: np.ndarray, source: np.ndarray) -> None:
    """Let the current stream copy elements, some time."""
    into, out_of = _loose(target), _loose(source)
    device.current_stream().put(lambda: np.copyto(into, out_of, "unsafe"))


def _loose(memory: np.ndarray) -> np.ndarray:
    """Return an array in the same memory that does not keep it."""
    nbytes = sum((extent - 1) * stride for extent, stride in zip(memory.shape, memory.strides, strict=True)) + memory.itemsize
    held = (ctypes.c_char * (nbytes if memory.size else 0)).from_address(memory.ctypes.data)
    return np.ndarray(memory.shape, memory.dtype, held, strides=memory.strides)


def _check(values: Any) -> None:
    for value in values:
        if hasattr(value, "__array_ufunc__") and not isinstance(value, (ndarray, np.generic)):
            raise TypeError(f"Unsupported type {type(value)}")


def _raw(value: Any) -> Any:
    return value._memory if isinstance(value, ndarray) else value


def _wrapped(leaf: Any, device: StandInDevice) -> Any:
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return leaf
    memory = np.asarray(leaf)
    return _new(memory, device) if memory.flags.owndata else ndarray(memory, device)


def _new(values: np.ndarray, device: StandInDevice) -> ndarray:
    """Return an array in memory of the pool, which is written when all that is on the current stream has been done.

    A thread that has not made the device its current one makes an array on the other GPU.
    """
    if not device.is_active():
        return ndarray(values, device.other)
    order = "C" if values.flags.c_contiguous else "F"
    memory, is_used = _lent(values.shape, values.dtype, device, order)
    made = ndarray(memory, device)
    if is_used:
        made._settle()
    memory[...] = values
    return made


def _lent(shape: Any, dtype: np.dtype, device: StandInDevice, order: Literal["C", "F"] = "C") -> tuple[np.ndarray, bool]:
    extents = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    memory, is_used = device.lend(prod(extents) * dtype.itemsize)
    return memory.view(dtype).reshape(extents, order=order), is_used


def _mapped(shape: tuple[int, ...], typestr: str, data: tuple[int, bool], **_: Any) -> Any:
    dtype = np.dtype(typestr)
    memory = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(data[0])
    return np.frombuffer(memory, dtype).reshape(shape)


def _remade(values: Any) -> ndarray:
    device = bound_device()
    assert isinstance(device, StandInDevice)
    return device.array_module.asarray(values)
