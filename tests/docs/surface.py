"""The public names of the package, found by looking: those of its modules."""

import ast
import dataclasses
import importlib
import inspect
import itertools
from typing import Any

import mpistrat
from mpistrat.lazy import homes

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
    names: dict[str, Any] = {}
    for prefix, face in (("", mpistrat), *((f"{name}.", resolve(name)) for name in FACES)):
        names |= {prefix + name: getattr(face, name) for name in face.__all__ if not inspect.ismodule(getattr(face, name))}
    return names


def described(name: str) -> str:
    """Return in one line what is at a public name."""
    if name in homes("mpistrat") and not callable(resolve(name)):
        return _constant(name)
    return (inspect.getdoc(resolve(name)) or "").partition("\n")[0].replace("``", "`")


def home(name: str) -> str:
    """Return the module that a public name comes from."""
    public = homes("mpistrat")
    return public[name][0] if name in public else str(resolve(name).__module__)


def _constant(name: str) -> str:
    """Return the first line of the text below the line that sets a constant."""
    lines = ast.parse(inspect.getsource(importlib.import_module(home(name)))).body
    for line, below in itertools.pairwise(lines):
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name and isinstance(below, ast.Expr):
            return inspect.cleandoc(str(ast.literal_eval(below.value))).partition("\n")[0].replace("``", "`")
    return ""


def _fields(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
