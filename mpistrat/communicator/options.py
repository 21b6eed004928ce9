"""CommunicationOptions: how a collective communicates."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

from mpistrat import settings
from mpistrat.algorithms.planners import PLANNERS
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.agreement import Agreement

WIRE_DTYPES = ("bfloat16", "float16")
NATIVE = "native"
_INTRA_DTYPES = ("float32", NATIVE)

_MERGED_KEPT = 64


class CommunicationImplementation(str, Enum):
    """The library that moves arrays inside a node."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for collectives; the options of a call override those of the strategy.

    The first three fields are TensorFlow's and merge as there: a value other than the default wins. In all others None says
    nothing and any other value wins, so ``algorithm="auto"`` of a call restores the default. Fields merge independently.

    Attributes
    ----------
    bytes_per_pack : int
        Split a batch of arrays into packs of about this many bytes; 0 means one pack per dtype.
    timeout_seconds : float or None
        Deadline of each collective in seconds; None or 0 means none. For one call, either all replicas have a deadline or none
        has. Once a deadline has passed, the strategy cannot make further collectives. Of what NCCL does on a GPU it counts from
        when the GPU comes to that, and the next call raises.
    implementation : CommunicationImplementation or str
        AUTO, RING or NCCL; names in upper or lower case. NCCL raises where it cannot be used; RING, TensorFlow's, means AUTO.
    algorithm : str or None
        ``auto``, the default, ``flat`` or ``hierarchical``. Not in TensorFlow.
    wire_dtype : str or None
        ``native``, the default, sends arrays as they are.
        ``bfloat16`` or ``float16``: float32, float16 and bfloat16 arrays are cast to it between nodes for SUM and MEAN, which
        halves the bytes of float32; they are added in float32. No effect inside a node, on other dtypes and operations, or
        where ``auto`` chooses ``flat``, as for small arrays. With s_i the sum over node i, the error is at most
        ``u * (sum|s_i| + |sum s_i|)`` to first order, for any number of nodes, in addition to the rounding of float32; u is
        2**-8 for bfloat16 and 2**-11 for float16, whose largest number is 65504: larger values overflow to infinity.
        Not in TensorFlow.
    deterministic : bool or None
        Combine in the order of the replicas, so that the bits of the result depend on the values alone: not on the nodes, on
        packs, or on `algorithm`, which does not apply. On one node each replica reduces the arrays of all in shared memory; on
        several nodes every replica exchanges a part of each array with every other one, which costs ``2 (n - 1)`` messages per
        replica and, between nodes, up to as many times the bytes of ``hierarchical`` as a node has replicas. Excludes
        `wire_dtype`. Not in TensorFlow.
    intra_dtype : str or None
        ``native``: SUM, MEAN and PROD of float16 and bfloat16 arrays on GPUs are computed in the dtype of the arrays inside a
        node, which halves the bytes that GPUs exchange; by default in ``float32``. NCCL rounds after each addition, so the
        error of a sum over p replicas is at most ``(p - 1) * u * sum|x_i|`` to first order, with the u of `wire_dtype`; sums of
        float16 overflow at 65504, also for MEAN. Between nodes MPI sends these 16 bits, which are added in float32, and
        `wire_dtype` does not apply; NCCL between nodes adds as inside them. No effect on other arrays, in host memory, where
        arrays are staged through host memory inside a node, or where ``flat`` is used with MPI. Excludes `deterministic`.
        Not in TensorFlow.
    num_packs : int or None
        Split the elements of a batch into this many equal packs, whatever `bytes_per_pack` says; the last one takes the
        remainder. 0: each array by itself. Not in TensorFlow.

    Raises
    ------
    InvalidArgumentError
        If a field does not accept its value, or `deterministic` is combined with `wire_dtype` or `intra_dtype`.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    algorithm: str | None = None
    wire_dtype: str | None = None
    deterministic: bool | None = None
    intra_dtype: str | None = None
    num_packs: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bytes_per_pack, int) or self.bytes_per_pack < 0:
            raise InvalidArgumentError(f"bytes_per_pack must be 0 or a positive number of bytes; got {self.bytes_per_pack!r}")
        seconds = self.timeout_seconds
        if seconds is not None and not (isinstance(seconds, (int, float)) and 0 <= seconds < math.inf):
            raise InvalidArgumentError(f"timeout_seconds must be None or a number of seconds >= 0; got {seconds!r}")
        if self.algorithm not in (None, "auto", *PLANNERS):
            raise InvalidArgumentError(f"algorithm must be auto or one of {', '.join(PLANNERS)}; got {self.algorithm!r}")
        if self.wire_dtype not in (None, NATIVE, *WIRE_DTYPES):
            raise InvalidArgumentError(f"wire_dtype must be {NATIVE}, {' or '.join(WIRE_DTYPES)}; got {self.wire_dtype!r}")
        if self.intra_dtype not in (None, *_INTRA_DTYPES):
            raise InvalidArgumentError(f"intra_dtype must be {' or '.join(_INTRA_DTYPES)}; got {self.intra_dtype!r}")
        if self.num_packs is not None and not (isinstance(self.num_packs, int) and self.num_packs >= 0):
            raise InvalidArgumentError(f"num_packs must be None, 0 (each array by itself) or positive; got {self.num_packs!r}")
        if not isinstance(self.deterministic, (bool, type(None))):
            raise InvalidArgumentError(f"deterministic must be True or False; got {self.deterministic!r}")
        if self.deterministic and self.wire_dtype in WIRE_DTYPES:
            raise InvalidArgumentError(f"deterministic=True excludes wire_dtype={self.wire_dtype!r}: nodes decide what is cast")
        if self.deterministic and self.intra_dtype == NATIVE:
            raise InvalidArgumentError("deterministic=True excludes intra_dtype='native': nodes decide what is rounded")
        try:
            member = CommunicationImplementation(str(getattr(self.implementation, "value", self.implementation)).upper())
        except ValueError:
            accepted = ", ".join(member.value for member in CommunicationImplementation)
            raise InvalidArgumentError(f"implementation must be one of {accepted}; got {self.implementation!r}") from None
        object.__setattr__(self, "implementation", member)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The values of all fields: a key for dicts, sooner hashed and compared than the options."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Return these options, overridden by the fields of `other` that have another value than the default of the class.

        Raises
        ------
        InvalidArgumentError
            If `other` is neither communication options nor None.
        """
        if other is None:
            return self
        check_options(other)
        found = self._merged.get(other.key)
        if found is None:
            if len(self._merged) == _MERGED_KEPT:
                self._merged.clear()
            chosen = {
                field.name: getattr(other if getattr(other, field.name) != field.default else self, field.name)
                for field in fields(self)
            }
            found = self._merged[other.key] = CommunicationOptions(**chosen)
        return found

    @cached_property
    def _merged(self) -> dict[tuple[Any, ...], CommunicationOptions]:
        """What `merge` has returned, by the key of the other options."""
        return {}


DEFAULTS = CommunicationOptions(algorithm="auto", wire_dtype=NATIVE, deterministic=False, intra_dtype=_INTRA_DTYPES[0])
"""What applies where nothing was said."""

_ALWAYS_TOLD, _MAY_DIFFER = ("algorithm", "bytes_per_pack"), ("timeout_seconds", "implementation")
_SHAPING = (
    *_ALWAYS_TOLD,
    *(field.name for field in fields(CommunicationOptions) if field.name not in (*_ALWAYS_TOLD, *_MAY_DIFFER)),
)
shaping_values = attrgetter(*_SHAPING)
"""Returns the values of the options that shape a program, the same on all ranks: of all but those in which ranks may differ."""


@lru_cache
def text_of_shaping(values: tuple[Any, ...]) -> str:
    """Return the text of such values."""
    told = zip(_SHAPING, values, strict=True)
    return ", ".join([f"{name}={value}" for name, value in told if name in _ALWAYS_TOLD or value != getattr(DEFAULTS, name)])


def CollectiveHints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:  # noqa: N802
    """Return communication options, under their former name.

    .. deprecated:: TensorFlow 2.4
        Use `CommunicationOptions`.

    Raises
    ------
    InvalidArgumentError
        If a field has a value that it does not accept.
    """
    warnings.warn("CollectiveHints is deprecated; use CommunicationOptions", DeprecationWarning, stacklevel=2)
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


def check_options(options: object, name: str = "options") -> None:
    """Check that an argument is communication options, or None."""
    if not isinstance(options, (CommunicationOptions, type(None))):
        raise InvalidArgumentError(f"{name} must be CommunicationOptions or None; got {options!r}")


def rendezvous_seconds(options: object) -> float:
    """Return how many seconds ranks wait for each other while a communicator is made; 0 means forever."""
    if isinstance(options, CommunicationOptions) and options.timeout_seconds is not None:
        return options.timeout_seconds
    return settings.TIMEOUT_SECONDS.read_or_default()


def shared_defaults(agreement: Agreement, values: settings.Snapshot) -> CommunicationOptions:
    """Return the default options from the settings, after checking that all ranks have the same. A collective call."""
    if values.error is not None:
        agreement.check("settings that cannot be read", values.error)
    shared = [f"{setting.name}={values[setting]}" for setting in settings.SETTINGS if setting.is_shared]
    timeout_seconds = values[settings.TIMEOUT_SECONDS] or None
    # deadlines may differ, but ranks without a deadline do not answer those that have one
    shared.append(f"{settings.TIMEOUT_SECONDS.name} {'set' if timeout_seconds else 'not set'}")
    hint = "a launcher hands variables to other hosts only if told: mpiexec -x NAME (Open MPI), -genv NAME VALUE (MPICH)"
    agreement.check(f"settings {', '.join(shared)} ({hint})")
    return DEFAULTS.merge(CommunicationOptions(algorithm=values[settings.ALGORITHM], timeout_seconds=timeout_seconds))
