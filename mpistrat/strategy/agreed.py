"""The collectives of a strategy, made with options that all its ranks agree on."""

from __future__ import annotations

from mpistrat.cross_device.hierarchical import HierarchicalCollectives
from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.hierarchy import Hierarchy

__all__ = ["agreed_collectives"]


def agreed_collectives(
    strategy: str, hierarchy: Hierarchy, options: CommunicationOptions | None, num_packs: int | None
) -> HierarchicalCollectives:
    """Return collectives over `hierarchy`, which they own from here on. A collective call.

    Ranks with different options would cut their batches differently and wait for each other, so they are compared here,
    in strict mode or not.

    Parameters
    ----------
    strategy : str
        What the options were passed to, for errors.
    hierarchy : Hierarchy
        The groups to work on; freed where this raises.
    options : CommunicationOptions or None
        Hold for every call that does not say otherwise.
    num_packs : int or None
        As for `HierarchicalCollectives`.

    Raises
    ------
    InvalidArgumentError
        If the options are no CommunicationOptions, or `num_packs` is negative.
    AgreementError
        On every rank that could go on, if ranks passed different options.
    """
    error: Exception | None = None
    try:
        _check_type(options)
        ops = HierarchicalCollectives(hierarchy, options, num_packs)
    except (TypeError, ValueError) as refused:
        error = refused
    try:
        call = f"{strategy}(communication_options={options!r}, num_packs={num_packs!r})"
        Agreement(hierarchy.world_group).check(call, error)
    except Exception:
        hierarchy.close()
        raise
    return ops


def _check_type(options: object) -> None:
    if not isinstance(options, (CommunicationOptions, type(None))):
        raise InvalidArgumentError(f"communication_options must be CommunicationOptions or None; got {type(options).__name__}")
