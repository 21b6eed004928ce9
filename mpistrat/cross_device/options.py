"""CommunicationOptions: how a batch of arrays is to be communicated."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum

from mpistrat import settings
from mpistrat.algorithms.choose import PLANNERS
from mpistrat.errors import InvalidArgumentError, SettingError
from mpistrat.groups.agreement import Agreement

__all__ = ["CommunicationImplementation", "CommunicationOptions", "shared_defaults"]


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
        if not isinstance(self.bytes_per_pack, int) or self.bytes_per_pack < 0:
            raise InvalidArgumentError(f"bytes_per_pack must be 0 or a positive number of bytes; got {self.bytes_per_pack!r}")
        seconds = self.timeout_seconds
        if seconds is not None and not (isinstance(seconds, (int, float)) and 0 <= seconds < math.inf):
            raise InvalidArgumentError(f"timeout_seconds must be None or a number of seconds >= 0; got {seconds!r}")
        if self.algorithm not in ("auto", *PLANNERS):
            raise InvalidArgumentError(f"algorithm must be auto or one of {', '.join(PLANNERS)}; got {self.algorithm!r}")
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


def shared_defaults(agreement: Agreement) -> CommunicationOptions:
    """Return the options that the settings ask for, after checking that all ranks have the same. A collective call.

    Raises
    ------
    SettingError
        If a setting cannot be read here.
    AgreementError
        On every other rank then, and on all ranks where a setting that must be shared differs.
    """
    try:
        values = [f"{setting.name}={setting.read()}" for setting in settings.SHARED]
        timeout_seconds = settings.TIMEOUT_SECONDS.read() or None
    except SettingError as error:
        agreement.check("settings that cannot be read", error)
        raise
    hint = "a launcher hands variables to other hosts only if told: mpiexec -x NAME (Open MPI), -genv NAME VALUE (MPICH)"
    agreement.check(f"settings {', '.join(values)} ({hint})")
    return CommunicationOptions(algorithm=settings.ALGORITHM.read(), timeout_seconds=timeout_seconds)
