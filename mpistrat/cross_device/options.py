"""CommunicationOptions: how a batch of arrays is to be communicated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from mpistrat.errors import InvalidArgumentError

__all__ = ["CommunicationImplementation", "CommunicationOptions"]


class CommunicationImplementation(str, Enum):
    """Which library moves the bytes inside a node."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for collectives; a call's options win over the strategy's.

    Attributes
    ----------
    bytes_per_pack : int
        Cut a batch of arrays into packs of about this many bytes; 0 means one pack per dtype.
    timeout_seconds : float or None
        Deadline of each collective in seconds; None or 0 means none.
    implementation : CommunicationImplementation or str
        AUTO, RING or NCCL; names in any case.
    algorithm : str
        ``auto``, ``flat``, ``leader``, ``hierarchical`` or ``pipelined``. Not in TensorFlow.

    Raises
    ------
    InvalidArgumentError
        If a field has a value that it does not accept.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise InvalidArgumentError(f"bytes_per_pack must be 0 or a positive number of bytes; got {self.bytes_per_pack}")
        if self.timeout_seconds is not None and self.timeout_seconds < 0:
            raise InvalidArgumentError(f"timeout_seconds must be None or >= 0; got {self.timeout_seconds}")
        try:
            member = CommunicationImplementation(str(getattr(self.implementation, "value", self.implementation)).upper())
        except ValueError:
            accepted = ", ".join(member.value for member in CommunicationImplementation)
            raise InvalidArgumentError(f"implementation must be one of {accepted}; got {self.implementation!r}") from None
        object.__setattr__(self, "implementation", member)

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Return options in which the fields of `other` that are not at their default win."""
        if other is None or other == CommunicationOptions():
            return self
        chosen = {
            field.name: getattr(other if getattr(other, field.name) != field.default else self, field.name)
            for field in fields(self)
        }
        return CommunicationOptions(**chosen)
