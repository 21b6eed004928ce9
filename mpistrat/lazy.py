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
