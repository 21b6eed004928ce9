"""The values of a checkpoint, as named arrays and a document of JSON, and back.

In the document a number, a text, a bool and None stand for themselves. Everything else is a list of its kind and what it holds:

=============================  =====================================================
``["array", name, library]``   an array of NumPy, CuPy, PyTorch or JAX, or a scalar of NumPy
``["variable", name]``         an `mpistrat.Variable`, or one on servers
``["state", node]``            an object with ``state_dict`` and ``load_state_dict``
``["generator", node]``        a generator of random numbers of NumPy
``["dict", [[key, node], …]]`` also ``list`` and ``tuple``, of nodes
=============================  =====================================================
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cache
from hashlib import blake2b
from itertools import repeat
from math import prod
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - NumPy knows its dtypes by name then
import numpy as np

from mpistrat.arrays import Array, as_array, as_target, checksum, is_a, is_aligned, is_on_device, like, to_device
from mpistrat.communicator.validate import name_of
from mpistrat.context.stack import default_mode
from mpistrat.errors import CheckpointError, InvalidArgumentError, UnsupportedDtypeError
from mpistrat.inputs.sources import DatasetIterator, Resumable
from mpistrat.state.variables import Variable
from mpistrat.watch.recorder import hash_of

Node = Any
_PLAIN = (type(None), bool, int, float, str)
_MOST_LEVELS = 100  # of nests; Python's JSON and pickle have limits not far above
_MOST_SHOWN = 20  # reasons why a checkpoint does not fit, or cannot be saved
_ACCEPTED = (
    "accepted are variables, arrays, objects with state_dict and load_state_dict, generators of NumPy, numbers, texts, and "
    "dicts, lists and tuples of these"
)


def listed(head: str, texts: Sequence[str], tail: Sequence[str] = ()) -> str:
    """Return texts one below the other, but for those after the first 20."""
    rest = [f"and {len(texts) - _MOST_SHOWN} more"] if len(texts) > _MOST_SHOWN else []
    return "\n    ".join([head, *texts[:_MOST_SHOWN], *rest, *tail])


@cache
def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element of a dtype with that name, which NumPy would parse anew each time."""
    return np.dtype(dtype).itemsize


class Spec(NamedTuple):
    """What an array is like."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return itemsize_of(self.dtype)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Tree:
    """What objects hold now: the document, and by name their `arrays`, their `variables`, and `states`, what has a state."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self.arrays: dict[str, Array] = {}
        self.variables: dict[str, Variable] = {}
        self.states: dict[str, Any] = {}
        # how the names of arrays begin that may come and go: an optimizer has none before its first step
        self._changing: list[str] = []
        self.document: Node = ["dict", [[name, self._encoded(value, name)] for name, value in objects.items()]]
        leaves: dict[str, Any] = self.arrays | self.variables
        self.specs = {name: Spec(name_of(leaf.dtype), tuple(leaf.shape)) for name, leaf in leaves.items()}

    def check_in_place(self) -> None:
        """Check that each object can be changed."""
        for name, value in self._objects.items():
            kind = _kind(value)
            is_fixed = kind in ("plain value", "tuple") or (kind == "array" and _memory(value) is None)
            if is_fixed or (kind == "dict" and not isinstance(value, dict)):
                raise InvalidArgumentError(
                    f"{name} is of type {type(value).__name__}, and cannot be restored in place; {_ACCEPTED}. Numbers, and "
                    "arrays that cannot be written to, live in a dict.\n"
                    "    incorrect:  mpistrat.Checkpoint(step=0)\n"
                    "    correct:    state = {'step': 0}; mpistrat.Checkpoint(state=state)"
                )

    def digest(self, most_bytes: int | None, call: str) -> int:
        """Return a hash that differs between ranks if they make another call, or hold other things.

        Of each array a sample of so many bytes is looked at, which moves from save to save: it follows from the call.
        """
        arrays = checksum(self._compared().values(), most_bytes, hash_of(call))
        return _hash_of((call, self.document, [*map(tuple, self.specs.values())], arrays))  # names are in the document

    def digests(self, most_bytes: int | None, call: str) -> dict[str, int]:
        """Return such a hash of each array, and of what objects hold beside these."""
        found = {f"{name}, beside its arrays": _hash_of(node) for name, node in self.document[1]}
        for name, leaf in self._compared().items():
            found[name] = _hash_of((tuple(self.specs[name]), checksum([leaf], most_bytes, hash_of(call))))
        return found

    def _compared(self) -> dict[str, Array]:
        """Return the arrays that each rank has, with the variables that were made outside all scopes."""
        mine = default_mode().strategy
        own = {name: each for name, each in self.variables.items() if getattr(each, "distribute_strategy", None) is mine}
        return self.arrays | {name: as_array(each) for name, each in own.items()}

    def check(self, saved: Mapping[str, Spec], document: Node, is_strict: bool) -> None:
        """Check that what was saved can be restored to the objects; the error has all reasons why not."""
        nodes = dict(document[1])
        pairs = [pair for name in nodes if name in self._objects for pair in _pairs(nodes[name], self._objects[name], name)]
        numbers = {name for node, old, name in pairs if _is_number(node) and isinstance(old, (*_PLAIN, np.generic))}
        mine, saved = ({name: each for name, each in specs.items() if name not in numbers} for specs in (self.specs, saved))
        texts = [
            f"{name} has {mine[name]} here, and {saved[name]} there"
            for name in mine
            if saved.get(name, mine[name]) != mine[name]
        ]
        texts += [text for name in nodes if name in self._objects for text in _misfits(nodes[name], self._objects[name], name)]
        if is_strict:
            texts += [f"{name} is missing there" for name in self._others(self._objects, mine, nodes, saved)]
            others = self._others(nodes, saved, self._objects, mine)
            texts += [f"{name} is unexpected: nothing here has this name" for name in others]
        if texts:
            raise CheckpointError(listed("what was saved does not fit these objects:", texts))

    def targets(self, document: Node) -> dict[str, Array]:
        """Return the memory of the arrays to which `restore` writes what has their names, where that is host memory."""
        nodes = [(node, self._objects[name]) for name, node in document[1] if name in self._objects]
        found = {name: memory for each in nodes for name, memory in _targets(*each)}
        return {name: memory for name, memory in found.items() if self.specs[name] == Spec(str(memory.dtype), memory.shape)}

    def restore(self, document: Node, values: Mapping[str, Array]) -> None:
        """Write what was saved to the objects, but for variables."""
        for name, node in document[1]:
            if name in self._objects:
                restored(node, values, self._objects[name])

    def _others(self, objects: Any, names: Any, other_objects: Any, other_names: Any) -> Iterator[str]:
        """Yield the names on one side that the other one must have and has not."""
        absent = [name for name in objects if name not in other_objects]
        yield from absent
        known = tuple(f"{name}/" for name in absent) + tuple(self._changing)
        yield from (name for name in names if name not in other_names and not f"{name}/".startswith(known))

    def _encoded(self, value: Any, name: str) -> Node:
        is_new = name not in self.arrays and name not in self.variables
        if type(value) is np.ndarray and is_new:  # most are, and the questions below take time
            self.arrays[name] = as_array(value, name)
            return ["array", name, "numpy"]
        kind = _kind(value)
        if kind == "plain value":
            return value
        if name.count("/") > _MOST_LEVELS:
            root = name.partition("/")[0]
            raise InvalidArgumentError(f"{root} contains itself, or has more than {_MOST_LEVELS} levels: it cannot be saved")
        if kind in ("state", "generator"):
            self.states.setdefault(name, value)
            if not is_a(value, "torch.nn", "Module"):
                self._changing.append(f"{name}/")
            return [kind, self._encoded(value.state_dict() if kind == "state" else value.bit_generator.state, name)]
        if kind == "dict":
            if not all(type(key) in _PLAIN for key in value):
                raise InvalidArgumentError(f"the keys of {name} must be texts or numbers; got {list(value)!r}")
            return [kind, [[key, self._encoded(each, f"{name}/{key}")] for key, each in value.items()]]
        if kind in ("list", "tuple"):
            return [kind, [self._encoded(each, f"{name}/{index}") for index, each in enumerate(value)]]
        if not is_array(value):
            raise UnsupportedDtypeError(
                f"{name} is of type {type(value).__name__}, which a checkpoint cannot hold; {_ACCEPTED}"
            )
        if not is_new:
            raise InvalidArgumentError(f"two arrays of the checkpoint have the name {name}; give their keys other names")
        if kind == "variable":
            self.variables[name] = value
            return [kind, name]
        self.arrays[name] = as_array(value, name)
        return [kind, name, _library(value)]


def restored(node: Node, values: Mapping[str, Array], old: Any = None) -> Any:
    """Return what a node stands for: `old`, changed, wherever that can be changed; else a new value."""
    if not isinstance(node, list):
        return node
    kind, content, *library = node
    if kind == "dict":
        olds = old if isinstance(old, Mapping) else {}
        found = {key: restored(each, values, olds.get(key)) for key, each in content}
        if isinstance(old, dict):
            for key, each in found.items():  # a Counter's update would add
                old[key] = each
        return old if isinstance(old, dict) else found
    if kind in ("list", "tuple"):
        before = [*(old if isinstance(old, (list, tuple)) else ()), *repeat(None, len(content))]
        items = [restored(each, values, one) for each, one in zip(content, before, strict=False)]
        if kind == "tuple":
            return type(old)(*items) if hasattr(old, "_fields") else tuple(items)
        if isinstance(old, list):
            old[:] = items
        return old if isinstance(old, list) else items
    if kind in ("generator", "state"):
        state = restored(content, values)
        if _kind(old) != kind:
            return state
        if kind == "generator":
            old.bit_generator.state = state
        else:
            old.load_state_dict(_in_classes(state, old.state_dict()))
        return old
    if isinstance(old, Variable):
        return old
    if library == ["scalar"]:
        return values[content][()]
    return _written(old, values[content]) if is_array(old) else _new(values[content], *library)


def _in_classes(value: Any, model: Any) -> Any:
    """Return a dict in the class that another one has, a Counter for example; likewise the dicts that it holds."""
    if not (isinstance(value, dict) and isinstance(model, dict)):
        return value
    found = copy(model)  # with what PyTorch keeps beside the state of a module: the versions of its parts
    found.clear()
    for key, each in value.items():
        found[key] = _in_classes(each, model.get(key))
    return found


def _pairs(node: Node, old: Any, name: str = "") -> Iterator[tuple[Node, Any, str]]:
    """Yield a node, what it is restored to, and the name of that; then what both hold, where they are nests of one kind."""
    yield node, old, name
    if isinstance(node, list) and node[0] == _kind(old) and node[0] in ("dict", "list", "tuple"):
        olds, each_below = (old, node[1]) if node[0] == "dict" else (dict(enumerate(old)), enumerate(node[1]))
        for key, each in each_below:
            if key in olds:
                yield from _pairs(each, olds[key], f"{name}/{key}")


def _targets(node: Node, old: Any) -> Iterator[tuple[str, Array]]:
    """Yield the names and the memory of arrays to which `restored` writes, but for those of objects with a state."""
    for each, one, _ in _pairs(node, old):
        if isinstance(each, list) and each[0] == "array" and each[2:] != ["scalar"] and _kind(one) == "array" and is_array(one):
            memory = _memory(one)
            if memory is not None and not is_on_device(memory) and memory.flags.c_contiguous and is_aligned(memory):
                yield each[1], memory


def _is_number(node: Node) -> bool:
    """Return whether a node stands for a number, a text or None, also of NumPy: these take each other's place."""
    return not isinstance(node, list) or node[2:] == ["scalar"]


def is_array(value: Any) -> bool:
    """Return whether a value has a dtype and a shape."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _kind(value: Any) -> str:
    if type(value) is np.ndarray:
        return "array"
    if type(value) in _PLAIN:
        return "plain value"
    if isinstance(value, Variable):
        return "variable"
    if isinstance(value, np.random.Generator):
        return "generator"
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "state"
    if isinstance(value, Mapping):
        return "dict"
    return "tuple" if isinstance(value, tuple) else "list" if isinstance(value, list) else "array"


def _misfits(node: Node, value: Any, root: str) -> Iterator[str]:
    """Yield why a value cannot be restored from a node; below it another value can take the place of most."""
    for each, old, name in _pairs(node, value, root):
        kind = each[0] if isinstance(each, list) else "plain value"
        wanted, kind = _kind(old).replace("variable", "array"), kind.replace("variable", "array")
        if wanted != kind:
            if name == root or wanted in ("generator", "state"):
                yield f"{name} is of kind {wanted} here, and {kind} there"
        elif kind == "generator":
            mine, saved = old.bit_generator.state["bit_generator"], dict(each[1][1])["bit_generator"]
            if mine != saved:
                yield f"{name} is a generator {mine} here, and {saved} there"
        elif isinstance(old, (DatasetIterator, Resumable)):
            try:
                old.check_position(restored(each[1], {}))
            except InvalidArgumentError as error:
                yield f"{name}: {error}"


def _hash_of(value: Any) -> int:
    """Return a hash of lists, numbers and texts, below 2**62; whether two are one object makes no difference, nor which NaN."""
    return int.from_bytes(blake2b(marshal.dumps(value, 1), digest_size=8).digest(), "little") >> 2


def _memory(value: Any) -> Array | None:
    """Return the memory of an array; None if it cannot be written to."""
    try:
        target = as_target(value)
    except InvalidArgumentError:  # JAX's arrays
        return None
    return target if getattr(target.flags, "writeable", True) else None


def _written(value: Any, saved: Array) -> Any:
    """Return an array that holds what was saved: `value` itself, if it can be written to."""
    target = _memory(value)
    if target is None or (str(target.dtype), target.shape) != (str(saved.dtype), saved.shape):
        return like(saved, value)
    if target is not saved:
        target[...] = to_device(saved) if is_on_device(target) else saved
    return value


def _library(value: Any) -> str:
    if isinstance(value, np.generic):
        return "scalar"
    return {"jaxlib": "jax"}.get(found := type(value).__module__.partition(".")[0], found)


def _new(saved: Array, library: str = "numpy") -> Any:
    """Return an array as one of a library, if the program has imported that."""
    if library == "cupy":
        return to_device(saved)
    if library not in ("torch", "jax"):
        return saved
    module = sys.modules.get(library)
    if module is None:
        raise CheckpointError(f"an array of {library} was saved, and {library} was not imported here: import it first")
    return like(saved, module.empty(0) if library == "torch" else module.numpy.empty(0))
