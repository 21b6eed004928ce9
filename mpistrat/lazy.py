"""What is imported when it is first used: the modules of the public names of a package, and MPI.

The imports for type checkers at the top of a package are the table of its names, which is read from there.
"""

from __future__ import annotations

import importlib
import linecache
import re
import sys
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

_IMPORT = re.compile(r"^    from (\S+) import (\w+) as (\w+)", re.MULTILINE)


def homes(package: str) -> dict[str, tuple[str, str]]:
    """Return the module and the name there of each public name of a package."""
    namespace = vars(sys.modules[package])
    source = "".join(linecache.getlines(namespace["__file__"], namespace))
    return {public: (module, name) for module, name, public in _IMPORT.findall(source)}


def publish(package: str) -> None:
    """Give a package its ``__all__``, and what finds these names and lists them."""
    namespace, found_in = vars(sys.modules[package]), homes(package)
    names = sorted(found_in)

    def find(name: str) -> Any:
        if name not in found_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        module, there = found_in[name]
        if module == package:
            found: Any = importlib.import_module(f"{module}.{there}")
        else:
            importlib.import_module("mpistrat.strategy")  # which registers the default strategy
            found = getattr(importlib.import_module(module), there)
        namespace[name] = found
        return found

    namespace.update(__all__=names, __getattr__=find, __dir__=lambda: [*names, *({"__version__"} & namespace.keys())])


class LazyModule:
    """Stands for a module, which is imported when one of its names is first used."""

    __slots__ = ("__dict__", "_name")

    def __init__(self, name: str) -> None:
        self._name = name if ":" in name else f"{name}:"  # without one `resolve_name` hides why a module cannot be imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as what inspects this object looks for
            raise AttributeError(name)
        module = resolve_name(self._name)
        self.__dict__ = vars(module)  # so that this is called once
        return getattr(module, name)


if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:
    MPI = LazyModule("mpi4py.MPI")
