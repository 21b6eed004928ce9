"""Buckets: which arrays share a buffer, by bytes_per_pack and num_packs as TensorFlow defines them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.errors import InvalidArgumentError

__all__ = ["pack_by_bytes", "split_evenly"]


def pack_by_bytes(sizes_bytes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Return packs of indices, in order. A pack is complete when it is larger than the limit, so packs exceed it a little.

    Parameters
    ----------
    sizes_bytes : sequence of int
        Bytes of each array.
    bytes_per_pack : int
        The limit; 0 means one pack.

    Raises
    ------
    InvalidArgumentError
        If the limit is negative.
    """
    if bytes_per_pack < 0:
        raise InvalidArgumentError(f"bytes_per_pack must be 0 (one pack) or a positive number of bytes; got {bytes_per_pack}")
    packs: list[list[int]] = []
    open_bytes = 0
    for index, size in enumerate(sizes_bytes):
        if not packs or (bytes_per_pack and open_bytes > bytes_per_pack):
            packs.append([])
            open_bytes = 0
        packs[-1].append(index)
        open_bytes += size
    return packs


def split_evenly(count: int, num_packs: int) -> list[int]:
    """Return the elements of each pack if `count` elements are cut into equal packs; the last one takes the remainder.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is not positive.
    """
    if num_packs < 1:
        raise InvalidArgumentError(f"num_packs must be at least 1 to cut a buffer; got {num_packs}")
    width = count // num_packs
    return [width] * (num_packs - 1) + [count - width * (num_packs - 1)]
