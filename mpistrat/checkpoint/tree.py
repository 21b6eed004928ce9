"""The values of a checkpoint, as named arrays and a document of JSON, and back.

In the document a number, a text, a bool and None stand for themselves. Everything else is a list of its kind and what it holds:

=============================  =====================================================
``["array", name, library]``   an array of NumPy, CuPy, PyTorch or JAX
``["variable", name]``         an `mpistrat.Variable`, or one on servers
``["state", node]``            an object with ``state_dict`` and ``load_state_dict``
``["generator", node]``        a generator of random numbers of NumPy
``["dict", [[key, node], …]]`` also ``list`` and ``tuple``, of nodes
=============================  =====================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, as_target, is_on_device, like, to_device
from mpistrat.errors import CheckpointError, InvalidArgumentError, UnsupportedDtypeError
from mpistrat.state.variables import Variable

Node = Any
_PLAIN = (type(None), bool, int, float, str)
_ACCEPTED = (
    "accepted are variables, arrays, objects with state_dict and load_state_dict, generators of NumPy, numbers, texts, and "
    "dicts, lists and tuples of these"
)


class Spec(NamedTuple):
    """What an array is like."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Tree:
    """The objects of a checkpoint by name."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        for name, value in self._objects.items():
            if isinstance(value, (*_PLAIN, tuple, np.generic)) or not _is_known(value):
                raise InvalidArgumentError(
                    f"{name} is of type {type(value).__name__}, which cannot be restored in place; {_ACCEPTED}. A number lives "
                    "in a dict.\n"
                    "    incorrect:  mpistrat.Checkpoint(step=0)\n"
                    "    correct:    state = {'step': 0}; mpistrat.Checkpoint(state=state)"
                )

    def capture(self) -> tuple[Node, dict[str, Array]]:
        """Return the document, and the arrays by name. A collective call, as reading a variable is."""
        arrays: dict[str, Array] = {}

        def add(name: str, value: Any) -> None:
            if name in arrays:
                raise InvalidArgumentError(f"two arrays of the checkpoint have the name {name}; give their keys other names")
            arrays[name] = as_array(value.read() if isinstance(value, Variable) else value, name)

        return ["dict", [[name, _encoded(value, name, add)] for name, value in self._objects.items()]], arrays

    def problems(self, saved: Mapping[str, Spec], document: Node, is_strict: bool) -> list[str]:
        """Return why what was saved cannot be restored to these objects, a line for each reason."""
        mine, bare = self._outline()
        nodes = dict(document[1])
        differ = [name for name in mine if mine[name] != saved.get(name, mine[name])]
        texts = [f"{name} has {mine[name]} here, and {saved[name]} there" for name in differ]
        if not is_strict:
            return texts
        missing = [name for name in mine if name not in saved] + [name for name in self._objects if name not in nodes]
        known = {*mine, *(name for name in saved if name.startswith(tuple(bare)))}
        unexpected = [name for name in saved if name not in known]
        unexpected += [name for name in nodes if name not in self._objects and name not in saved]
        texts += [f"{name} is missing there" for name in missing]
        return texts + [f"{name} is unexpected: nothing here has this name" for name in unexpected]

    def restore(self, document: Node, values: Mapping[str, Array]) -> None:
        """Write what was saved to the objects. A collective call, as assigning to a variable is."""
        for name, node in document[1]:
            if name in self._objects:
                _put(self._objects[name], node, values)

    def _outline(self) -> tuple[dict[str, Spec], list[str]]:
        """Return what each array is like, and how the names begin that objects without any array so far may have."""
        found: dict[str, Spec] = {}
        bare: list[str] = []

        def add(name: str, value: Any) -> None:
            array = value if isinstance(value, Variable) else as_array(value, name)
            found[name] = Spec(str(array.dtype), tuple(array.shape))

        def note(name: str, has_arrays: bool) -> None:
            if not has_arrays:  # an optimizer before its first step
                bare.append(f"{name}/")

        for name, value in self._objects.items():
            _encoded(value, name, add, note)
        return found, bare


def decoded(node: Node, values: Mapping[str, Array]) -> Any:
    """Return a new value for a node, with the arrays in `values`; those that are not there are None."""
    if not isinstance(node, list):
        return node
    kind, content, *rest = node
    if kind == "dict":
        return {key: decoded(each, values) for key, each in content}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(decoded(each, values) for each in content)
    if kind == "array":
        return _in_library(values[content], rest[0]) if content in values else None
    return decoded(content, values) if kind in ("state", "generator") else values.get(content)


def _is_known(value: Any) -> bool:
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return is_array or _has_state(value) or isinstance(value, (Variable, np.random.Generator, Mapping, list, tuple, *_PLAIN))


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _encoded(
    value: Any, name: str, add: Callable[[str, Any], None], note: Callable[[str, bool], None] = lambda name, has_arrays: None
) -> Node:
    """Return the node of a value; `add` is called with each array, and `note` with whether an object with state has any."""

    def inner(each: Any, key: object) -> Node:
        return _encoded(each, f"{name}/{key}", add, note)

    if type(value) in _PLAIN:
        return value
    if isinstance(value, Variable):
        add(name, value)
        return ["variable", name]
    if isinstance(value, np.random.Generator):
        return ["generator", _encoded(value.bit_generator.state, name, add, note)]
    if _has_state(value):
        names: list[str] = []

        def add_and_count(each: str, array: Any) -> None:
            names.append(each)
            add(each, array)

        node = ["state", _encoded(value.state_dict(), name, add_and_count, note)]
        note(name, bool(names))
        return node
    if isinstance(value, Mapping):
        if not all(type(key) in _PLAIN for key in value):
            raise InvalidArgumentError(f"the keys of {name} must be texts or numbers; got {list(value)!r}")
        return ["dict", [[key, inner(each, key)] for key, each in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", [inner(each, index) for index, each in enumerate(value)]]
    if not _is_known(value):
        raise UnsupportedDtypeError(f"{name} is of type {type(value).__name__}, which a checkpoint cannot hold; {_ACCEPTED}")
    add(name, value)
    return ["array", name, _library(value)]


def _put(value: Any, node: Node, values: Mapping[str, Array]) -> Any:
    """Write what was saved to a value, and return what stands for it from now on: itself, if it can be changed."""
    kind: str = node[0] if isinstance(node, list) else ""
    content: Any = node[1] if kind else None
    if isinstance(value, Variable):
        if content in values:
            value.assign(values[content])
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = decoded(content, values)
    elif _has_state(value):
        value.load_state_dict(decoded(content, values))
    elif isinstance(value, dict) and kind == "dict":
        for key, each in content:
            value[key] = _put(value[key], each, values) if key in value else decoded(each, values)
    elif isinstance(value, list) and kind == "list":
        value[:] = [_put(*pair, values) if len(pair) == 2 else decoded(pair[0], values) for pair in _pairs(value, content)]
    elif isinstance(value, tuple) and kind == "tuple" and len(value) == len(content):
        parts = [_put(each, inner, values) for each, inner in zip(value, content, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    elif kind == "array" and _is_known(value) and not isinstance(value, _PLAIN):
        return _written(value, values[content]) if content in values else value
    else:
        return decoded(node, values)
    return value


def _pairs(value: list[Any], nodes: list[Node]) -> list[tuple[Any, ...]]:
    return [(value[index], node) if index < len(value) else (node,) for index, node in enumerate(nodes)]


def _written(value: Any, saved: Array) -> Any:
    """Return an array that holds what was saved: `value` itself, if it can be written to."""
    try:
        target = as_target(value)
        is_writable = getattr(target.flags, "writeable", True) and target.shape == saved.shape
    except InvalidArgumentError:  # JAX's arrays cannot be changed
        is_writable = False
    if not is_writable:
        return like(saved, value)
    target[...] = to_device(saved) if is_on_device(target) else saved
    return value


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _in_library(array: Array, library: str) -> Any:
    """Return an array as one of another library, if the program has imported that."""
    if library == "cupy":
        return to_device(array)
    module = sys.modules.get({"jaxlib": "jax"}.get(library, library))
    if library in ("numpy", "ml_dtypes"):
        return array
    if module is None:
        raise CheckpointError(f"an array of {library} was saved, and {library} was not imported here: import it first")
    return like(array, module.empty(0) if library == "torch" else module.numpy.empty(0))
