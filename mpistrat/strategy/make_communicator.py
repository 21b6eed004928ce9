"""The communicator of a strategy of several ranks, and the arguments that it is made with, checked on all ranks."""

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
    """Return the text of the call that makes a strategy, by which ranks compare their arguments."""
    return f"{strategy}({', '.join(f'{name}={_named(value)}' for name, value in arguments.items())})"


def check_communication(cross_device_ops: object, options: object, num_packs: int | None) -> None:
    """Check what a strategy is to communicate with.

    Raises
    ------
    InvalidArgumentError
        If the options are not CommunicationOptions, or `num_packs` is negative or says what `cross_device_ops` says already.
    TypeError
        If `cross_device_ops` is not a CrossDeviceOps.
    """
    if not isinstance(options, (CommunicationOptions, type(None))):
        raise InvalidArgumentError(f"communication_options must be CommunicationOptions or None; got {type(options).__name__}")
    HierarchicalAllReduce(num_packs)  # refuses a number of packs that cannot be
    if cross_device_ops is None:
        return
    if not isinstance(cross_device_ops, CrossDeviceOps):
        raise TypeError(
            f"cross_device_ops must be a CrossDeviceOps, such as mpistrat.ReductionToOneDevice(); got {cross_device_ops!r}"
        )
    if num_packs is not None:
        raise InvalidArgumentError(
            f"num_packs={num_packs} was passed beside cross_device_ops, which have their own.\n"
            "    incorrect:  mpistrat.MirroredStrategy(cross_device_ops=mpistrat.HierarchicalAllReduce(), num_packs=2)\n"
            "    correct:    mpistrat.MirroredStrategy(cross_device_ops=mpistrat.HierarchicalAllReduce(num_packs=2))"
        )


def make_communicator(hierarchy: Hierarchy, options: CommunicationOptions | None, num_packs: int | None) -> Communicator:
    """Return the communicator over `hierarchy`, which it owns from here on. A collective call.

    Parameters
    ----------
    hierarchy : Hierarchy
        The groups to work on; freed where this raises.
    options : CommunicationOptions or None
        Hold for every call that does not say otherwise; the same on all ranks.
    num_packs : int or None
        As for `Communicator`; the same on all ranks.

    Raises
    ------
    SettingError
        If a setting cannot be read here.
    AgreementError
        On the other ranks then, and on all where a setting differs that must be shared.
    TransportError
        On all ranks, if the settings name a transport that does not serve on one node.
    """
    try:
        with watched("making a strategy: what it communicates through"):
            return Communicator(hierarchy, options, num_packs=num_packs)
    except Exception:
        hierarchy.close()
        raise


def _named(value: object) -> str:
    """Return the text of an argument; of an object that prints as its address only the type, which ranks have in common."""
    if isinstance(value, CrossDeviceOps):
        return f"{type(value).__name__}(num_packs={value.num_packs})"
    if isinstance(value, type):
        return value.__name__
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)
