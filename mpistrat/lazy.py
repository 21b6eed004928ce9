"""The public names of a package, whose modules are imported when a name is first used.

The imports for type checkers at the top of the package are the table of its names, which is read from there.
"""

from __future__ import annotations

import importlib
import linecache
import re
import sys
from typing import Any

_IMPORT = re.compile(r"^    from (\S+) import (\w+) as (\w+)", re.MULTILINE)


class PublicNames:
    def __init__(self, package: str) -> None:
        globals_ = vars(sys.modules[package])
        source = "".join(linecache.getlines(globals_["__file__"], globals_))
        self.homes = {public: (module, name) for module, name, public in _IMPORT.findall(source)}
        self._package = package

    def find(self, name: str) -> Any:
        """Return what a name stands for, and keep it in the package; for its ``__getattr__``."""
        if name not in self.homes:
            listed = ", ".join(sorted(self.homes))
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}; it has {listed}")
        module, there = self.homes[name]
        if module == self._package:
            found: Any = importlib.import_module(f"{module}.{there}")
        else:
            importlib.import_module("mpistrat.strategy")  # which registers the default strategy
            found = getattr(importlib.import_module(module), there)
        setattr(sys.modules[self._package], name, found)
        return found
