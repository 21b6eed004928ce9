"""DistributedValues: values with one component per replica; each rank holds the component of its replica."""

from __future__ import annotations

import numbers
import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.arrays import Array, Readable, as_array, is_on_device, to_device, to_host
from mpistrat.context.stack import current, default_mode
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.structures import flatten, map_leaves

# NumPy functions that write to their first argument, which has one of these names
_WRITERS = (np.copyto, np.fill_diagonal, np.place, np.put, np.put_along_axis, np.putmask)
_WRITTEN = ("dst", "arr", "a")

# id of a component that `values` has returned -> the value that it belongs to
_containers: weakref.WeakValueDictionary[int, DistributedValues] = weakref.WeakValueDictionary()


def _of_array(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a function of the array that a value is read as."""
    return lambda self, *args: function(self.read(), *args)


class DistributedValues(Readable, np.lib.mixins.NDArrayOperatorsMixin):
    """A value with one component per replica. Strategies create them.

    In operators and NumPy functions it stands for the array that `read` returns, also on a GPU.
    """

    _in_place = "in replica context ctx.update(variable, fn, (value,))"  # how it is changed, for errors

    def __init__(self, component: Any) -> None:
        self._component = component

    @property
    def values(self) -> tuple[Any, ...]:
        """The components that this rank holds: a tuple of one."""
        if not isinstance(self._component, numbers.Number):  # one number may be a component of many values
            _containers[id(self._component)] = self
        return (self._component,)

    def in_replica(self) -> Any:
        """Return what replaces this value in the arguments of a function that ``strategy.run`` calls."""
        return self._component

    def across_replicas(self) -> DistributedValues:
        """Return what replaces this value in a reduction over all replicas."""
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self.read()
        if is_on_device(array):  # as CuPy does: an implicit copy would hide where the program computes
            raise TypeError(
                f"a {type(self).__name__} on a GPU was read by NumPy, which needs a copy in host memory; it is not made "
                "implicitly.\n"
                "    incorrect:  np.asarray(variable)\n"
                "    correct:    variable.numpy(), or variable.value for its array on the GPU; of any other distributed value "
                "strategy.experimental_local_results(value)[0].get()"
            )
        return np.array(array, dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if "out" in kwargs or method == "at":
            _check_targets(kwargs.get("out", inputs[0]))
        if "where" in kwargs:
            kwargs["where"] = _read(kwargs["where"])
        return getattr(ufunc, method)(*map(_read, inputs), **kwargs)

    def __array_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = (args[:1] or tuple(map(kwargs.get, _WRITTEN))) if func in _WRITERS else ()
        if written or "out" in kwargs:
            _check_targets((written, kwargs.get("out")))
        return func(*map_leaves(_read, args), **map_leaves(_read, kwargs))

    # protocols of sequences and numbers work if `read` does
    __len__ = _of_array(len)
    __iter__ = _of_array(iter)
    __float__ = _of_array(float)
    __int__ = _of_array(int)
    __complex__ = _of_array(complex)
    __bool__ = _of_array(bool)
    __getitem__ = _of_array(operator.getitem)

    def __index__(self) -> int:
        return to_host(self.read()).__index__()

    def __contains__(self, item: Any) -> bool:
        return item in to_host(self.read())

    def __format__(self, spec: str) -> str:
        return format(self.read(), spec) if spec else str(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        _check_targets(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._component!r})"


class PerReplica(DistributedValues):
    """A value whose components may differ. It can be read as an array only inside ``strategy.run``: as the local component."""

    def read(self) -> Array:
        """Return the component of this replica."""
        mode = current()
        if mode.replica_context is None or mode is default_mode():
            raise InvalidArgumentError(
                "a per-replica value was read as one array or number outside strategy.run, but it has a component on each "
                "replica.\n"
                "    incorrect:  np.sum(value); float(value); if value > limit: …\n"
                '    correct:    strategy.reduce("sum", value, axis=None), or strategy.gather(value, axis=0), or for the '
                "component of this rank strategy.local(value), which is strategy.experimental_local_results(value)[0]"
            )
        return as_array(self._component)


def _of_component(name: str, doc: str) -> Any:
    """Return a property that is that of the component: `read` would communicate for some variables."""
    return property(lambda self: getattr(as_array(self._component), name), doc=doc)


class Mirrored(DistributedValues):
    """A value whose components are equal on all replicas. It can be read as an array everywhere."""

    def read(self) -> Array:
        """Return the component of this rank; those of the other ranks are equal."""
        return as_array(self._component)

    shape: tuple[int, ...] = _of_component("shape", "Shape of the array.")
    dtype: np.dtype[Any] = _of_component("dtype", "Type of one element.")
    ndim: int = _of_component("ndim", "Number of axes.")
    size: int = _of_component("size", "Number of elements.")
    nbytes: int = _of_component("nbytes", "Bytes of all elements.")

    @property
    def T(self) -> Array:  # noqa: N802 - the name that it has everywhere
        """The transposed array."""
        return self.read().T

    def __len__(self) -> int:
        return len(as_array(self._component))  # without `read`, which communicates for some variables


def checked_args(args: Any) -> tuple[Any, ...]:
    """Return the arguments of a function, after checking that they are a sequence of these, and not one of them."""
    if not isinstance(args, (list, tuple)):
        raise InvalidArgumentError(f"args must be a list or tuple, for example args=(batch,); got {type(args).__name__}")
    return tuple(args)


def select_replica(value: Any) -> Any:
    """Return a nested value in which each distributed value is replaced by its component of this replica."""
    return map_leaves(in_replica, value)


def across_replicas(leaf: Any) -> Any:
    """Return what replaces a leaf in a reduction over replicas."""
    return leaf.across_replicas() if isinstance(leaf, DistributedValues) else leaf


def component_of(leaf: Any) -> Any:
    """Return what a reduction over replicas takes from this one for a leaf."""
    return in_replica(across_replicas(leaf))


def regroup(value: Any, num_replicas: int) -> Any:
    """Return what a function returned in ``strategy.run`` with each leaf as a per-replica value.

    Variables, mirrored values and functions stay as they are. Structures are compared only when the value is reduced.
    """
    return value if num_replicas == 1 else map_leaves(_per_replica, value)


def container_of(value: Any) -> Any:
    """Return the distributed value that `value` is a component of, or `value` itself if there is none."""
    found = _containers.get(id(value))
    return found if found is not None and found._component is value else value


def in_replica(leaf: Any) -> Any:
    """Return what replaces a leaf in the arguments of a function that ``strategy.run`` calls."""
    return leaf.in_replica() if isinstance(leaf, DistributedValues) else leaf


def _per_replica(leaf: Any) -> Any:
    return leaf if isinstance(leaf, DistributedValues) or callable(leaf) else PerReplica(leaf)


def _read(leaf: Any) -> Any:
    return leaf.read() if isinstance(leaf, DistributedValues) else leaf


def _check_targets(targets: Any) -> None:
    """Refuse to write to a distributed value, because only the component of this replica would change."""
    for target in flatten(targets)[0]:
        if isinstance(target, DistributedValues):
            raise TypeError(
                f"{target!r} cannot be the target of an in-place operation.\n"
                "    incorrect:  variable += value; variable[index] = value; np.add(variable, value, out=variable)\n"
                f"    correct:    variable.assign_add(value), or {target._in_place}"
            )


def assignable(value: Any, target: Array, owner: object) -> Array:
    """Return `value` as an array that can be assigned to `target`: in its dtype, and on its device."""
    array = as_array(value)
    if array.shape != target.shape:
        raise InvalidArgumentError(f"{owner!r} has shape {target.shape}; a value of shape {array.shape} cannot be assigned")
    fit = converted(array, target.dtype, owner)
    return to_device(fit) if is_on_device(target) else to_host(fit)


def converted(array: Array, dtype: np.dtype[Any], owner: object) -> Array:
    """Return `array` in `dtype`, the one of `owner`; signed and unsigned integers count as the same kind of number."""
    if array.dtype == dtype:
        return array
    if not (np.can_cast(array.dtype, dtype, casting="same_kind") or (array.dtype.kind == "i" and dtype.kind == "u")):
        advice = f"cast it first, value.astype({dtype.name!r})"
        raise UnsupportedDtypeError(f"{owner!r} has dtype {dtype}, which cannot hold a value of dtype {array.dtype}; {advice}")
    if dtype.kind in "iu" and array.size:
        limits, least, greatest = np.iinfo(dtype), int(array.min()), int(array.max())
        if least < limits.min or greatest > limits.max:
            held = f"which holds {limits.min} to {limits.max}"
            raise InvalidArgumentError(f"{owner!r} has dtype {dtype}, {held}; numbers from {least} to {greatest} would wrap")
    return array.astype(dtype)
