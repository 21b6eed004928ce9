"""The public names of the package, found by looking: those of its modules, and the members of its classes."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
from collections.abc import Collection
from enum import Enum
from typing import Any

import mpistrat

FACES = ("experimental", "experimental.coordinator", "experimental.partitioners", "cluster_resolver", "mpi4py", "torch", "jax")


def resolve(path: str) -> Any:
    """Return what is at a dotted name below ``mpistrat``; a field of a dataclass is its annotation."""
    found: Any = mpistrat
    for name in path.split("."):
        if inspect.ismodule(found) and not hasattr(found, name):
            try:
                found = importlib.import_module(f"{found.__name__}.{name}")
            except ModuleNotFoundError:
                raise AttributeError(f"mpistrat has no {path}") from None
        elif inspect.isclass(found) and name in _fields(found):
            found = _fields(found)[name]
        else:
            found = getattr(found, name)
    return found


def api_names() -> dict[str, Any]:
    """Return the public names of modules below ``mpistrat``: those of the package itself, then those of its faces."""
    return {name: thing for name, thing in public_names().items() if name.rpartition(".")[0] in ("", *FACES)}


def public_names() -> dict[str, Any]:
    """Return every public name below ``mpistrat``: modules' names first, then the members of each class."""
    things: dict[str, Any] = {}
    for prefix, face in (("", mpistrat), *((f"{name}.", resolve(name)) for name in FACES)):
        things |= {prefix + name: getattr(face, name) for name in face.__all__ if not inspect.ismodule(getattr(face, name))}
    public = {thing for thing in things.values() if inspect.isclass(thing)}
    names = dict(things)
    for name, thing in things.items():
        if inspect.isclass(thing):
            names |= {f"{name}.{member}": value for member, value in members(thing, public).items()}
    return names


def members(kind: type, public: Collection[type]) -> dict[str, Any]:
    """Return the public members of a class, those of its private bases included, that no public base has."""
    if issubclass(kind, Enum):
        return {member.name: member for member in kind} | {
            name: value for name, value in vars(kind).items() if isinstance(value, classmethod)
        }
    found: dict[str, Any] = dict(_fields(kind))
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("mpistrat.") and (base is kind or base not in public):
            found |= {name: value for name, value in vars(base).items() if _is_described(name, value)}
    inherited = {name for base in kind.__mro__[1:] if base in public for name in vars(base)}
    return {name: value for name, value in found.items() if name not in inherited}


def described(name: str) -> str:
    """Return in one line what is at a dotted name below ``mpistrat``."""
    owner, _, member = name.rpartition(".")
    kind = resolve(owner) if owner else mpistrat
    if name in vars(mpistrat)["_names"].homes and not callable(resolve(name)):
        return _constant(name)
    if inspect.isclass(kind) and issubclass(kind, Enum) and member in kind.__members__:
        return f"A member of `{owner}`."
    if inspect.isclass(kind) and member in _fields(kind):
        found = re.search(rf"^(?:\w+, )*{member}(?:, \w+)* : .*\n +(.+)", inspect.getdoc(kind) or "", re.MULTILINE)
        text = re.split(r"[.;:] |$", found[1])[0].rstrip(".") + "." if found else ""
    else:
        text = (inspect.getdoc(resolve(name)) or "").partition("\n")[0]
    return text.replace("``", "`")


def home(name: str) -> str:
    """Return the module that a public name comes from."""
    homes = vars(mpistrat)["_names"].homes
    return homes[name][0] if name in homes else str(resolve(name).__module__)


def _constant(name: str) -> str:
    """Return the first line of the text below the line that sets a constant."""
    lines = ast.parse(inspect.getsource(importlib.import_module(home(name)))).body
    for line, below in itertools.pairwise(lines):
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name and isinstance(below, ast.Expr):
            return inspect.cleandoc(str(ast.literal_eval(below.value))).partition("\n")[0].replace("``", "`")
    return ""


def _fields(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}


def _is_described(name: str, value: Any) -> bool:
    kinds = (property, classmethod, staticmethod)
    return re.match("[^_]", name) is not None and (inspect.isfunction(value) or isinstance(value, kinds))
