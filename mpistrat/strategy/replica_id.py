"""The index of a replica, checked."""

from __future__ import annotations

import operator
from typing import Any

from mpistrat.errors import InvalidArgumentError

__all__ = ["checked_id"]


def checked_id(replica_id: Any, num_replicas: int) -> int:
    """Return the index of a replica as an int.

    Raises
    ------
    InvalidArgumentError
        If it is not an integer, or out of range.
    """
    try:
        index = operator.index(replica_id)
    except TypeError:
        index = -1
    if not 0 <= index < num_replicas:
        raise InvalidArgumentError(
            f"replica_id_in_sync_group must be None or an integer from 0 to {num_replicas - 1}; got {replica_id!r}"
        )
    return index
