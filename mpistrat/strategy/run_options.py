"""RunOptions: TensorFlow's options of ``strategy.run``, which are for TPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["RunOptions"]


class RunOptions(NamedTuple):
    """Options of ``strategy.run`` for TPUs. Accepted, without effect.

    Attributes
    ----------
    experimental_enable_dynamic_batch_size : bool
        Whether batches may have different sizes.
    experimental_bucketizing_dynamic_shape : bool
        Whether shapes are rounded up to a few different ones.
    experimental_xla_options : object
        Options of the XLA compiler.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
