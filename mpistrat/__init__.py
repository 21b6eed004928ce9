"""The tf.distribute programming model for NumPy and CuPy arrays on MPI.

File law: importing the package starts neither MPI nor CUDA and reads no environment; a public name is imported from its
home when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpistrat import errors as errors
    from mpistrat.reduction import ReduceOp as ReduceOp

_HOMES = {
    "ReduceOp": "mpistrat.reduction",
}
_MODULES = ("errors",)

__all__ = sorted([*_HOMES, *_MODULES])  # noqa: PLE0605 - a list, computed so that no name is written twice
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"mpistrat.{name}")
    else:
        raise AttributeError(f"module 'mpistrat' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
