"""Attributes that users read and do not set."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def read_only(path: str, doc: str) -> Any:
    """Return a property that is another attribute: of the object, or where the path has dots, of what it refers to."""
    return property(attrgetter(path), doc=doc)
