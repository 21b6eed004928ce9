"""Create the communicator of a strategy of several ranks, from checked arguments."""

from __future__ import annotations

from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.cross_device.all_reduce import HierarchicalAllReduce
from mpistrat.cross_device.ops import CrossDeviceOps
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.watch.watched import watched

__all__ = ["call_text", "check_communication", "make_communicator"]


def call_text(strategy: str, **arguments: object) -> str:
    """Return the text of the call that creates a strategy, by which ranks compare their arguments."""
    return f"{strategy}({', '.join(f'{name}={_named(value)}' for name, value in arguments.items())})"


def check_communication(cross_device_ops: object, options: object, num_packs: int | None) -> None:
    """Check the arguments of a strategy that concern communication.

    Raises
    ------
    InvalidArgumentError
        If the options are not CommunicationOptions, or `num_packs` is negative or passed together with `cross_device_ops`.
    TypeError
        If `cross_device_ops` is not a CrossDeviceOps.
    """
    if not isinstance(options, (CommunicationOptions, type(None))):
        raise InvalidArgumentError(f"communication_options must be CommunicationOptions or None; got {type(options).__name__}")
    HierarchicalAllReduce(num_packs)  # raises if it is negative
    if cross_device_ops is None:
        return
    if not isinstance(cross_device_ops, CrossDeviceOps):
        raise TypeError(
            f"cross_device_ops must be a CrossDeviceOps, such as mpistrat.ReductionToOneDevice(); got {cross_device_ops!r}"
        )
    if num_packs is not None:
        raise InvalidArgumentError(
            f"num_packs={num_packs} was passed together with cross_device_ops, which have their own num_packs.\n"
            "    incorrect:  mpistrat.MirroredStrategy(cross_device_ops=mpistrat.HierarchicalAllReduce(), num_packs=2)\n"
            "    correct:    mpistrat.MirroredStrategy(cross_device_ops=mpistrat.HierarchicalAllReduce(num_packs=2))"
        )


def make_communicator(hierarchy: Hierarchy, options: CommunicationOptions | None, num_packs: int | None) -> Communicator:
    """Return the communicator over `hierarchy`. A collective call.

    Parameters
    ----------
    hierarchy : Hierarchy
        The groups; the communicator owns them, and they are freed if this raises.
    options : CommunicationOptions or None
        Defaults of every call; the same on all ranks.
    num_packs : int or None
        As for `Communicator`; the same on all ranks.

    Raises
    ------
    SettingError
        If a setting of this rank is invalid.
    AgreementError
        On the other ranks then, and on all ranks if a setting that must be shared differs.
    TransportError
        On all ranks, if a transport that the settings name cannot be used on one of the nodes.
    """
    try:
        with watched("creating a strategy: its communicator"):
            return Communicator(hierarchy, options, num_packs=num_packs)
    except Exception:
        hierarchy.close()
        raise


def _named(value: object) -> str:
    """Return the text of an argument: its repr, or only its type if the repr is an address, which differs between ranks."""
    if isinstance(value, CrossDeviceOps):
        return f"{type(value).__name__}(num_packs={value.num_packs})"
    if isinstance(value, type):
        return value.__name__
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)
