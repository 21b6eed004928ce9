"""RunOptions: what TensorFlow lets a caller of ``strategy.run`` ask of a TPU."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["RunOptions"]


class RunOptions(NamedTuple):
    """Options of ``strategy.run``. They concern TPUs only; here they are accepted and have no effect.

    Attributes
    ----------
    experimental_enable_dynamic_batch_size : bool
        Whether batches may have different sizes.
    experimental_bucketizing_dynamic_shape : bool
        Whether shapes are rounded up to few different ones.
    experimental_xla_options : object
        Options of the compiler.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
