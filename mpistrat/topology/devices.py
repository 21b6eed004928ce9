"""Device names: TensorFlow's names for this rank's own device, and names for the device of another rank.

========================================  ===============================================================
name                                      device
========================================  ===============================================================
``/cpu:0``, ``CPU:0``, ``cpu``            that of the rank that uses the name; each rank has one
``/gpu:0``, ``GPU:0``, ``gpu``            the same, if ranks compute on GPUs; then there is no CPU device
``/device:CPU:0``                         the same
``/job:localhost/…/task:0/device:CPU:0``  the same, as TensorFlow prints it
``rank:3``                                the device of rank 3
``/job:worker/replica:0/task:3/…``        the same; ``device_name(3)`` returns this form
========================================  ===============================================================

Invariant: neither MPI nor CUDA is started here; names are looked up in a `World`. Either all ranks compute on GPUs or none
does, so the others have the kind of device that this process has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpistrat.device.binding import own_device
from mpistrat.errors import InvalidArgumentError
from mpistrat.topology.world import World

_ACCEPTED = "accepted are /cpu:0, CPU:0, /gpu:0, /device:CPU:0, /job:worker/replica:0/task:1/device:CPU:0 and rank:1"
_RANK = re.compile(r"rank:(\d+)", re.IGNORECASE)
_NAME = re.compile(
    r"/?(?:job:(?P<job>[a-z][a-z0-9_]*)/)?(?:replica:(?P<replica>\d+)/)?(?:task:(?P<task>\d+)/)?"
    r"(?:device:)?(?P<kind>cpu|gpu)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class DeviceSpec:
    """A parsed device name."""

    kind: str  # CPU or GPU; empty if the name has only a rank
    index: int = 0  # among the rank's devices of that kind
    rank: int | None = None  # None: the rank that uses the name

    def __str__(self) -> str:
        own = f"{self.kind}:{self.index}"
        if self.rank is None:
            return f"/{own.lower()}"
        return f"/job:worker/replica:0/task:{self.rank}/device:{own}" if self.kind else f"rank:{self.rank}"


def parse_device(name: object) -> DeviceSpec:
    """Parse a device name, whether or not there is such a device."""
    text = name.strip() if isinstance(name, str) else ""
    ranked = _RANK.fullmatch(text)
    if ranked:
        return DeviceSpec("", rank=int(ranked[1]))
    match = _NAME.fullmatch(text)
    if match is None or (match["task"] and not match["job"]):
        raise InvalidArgumentError(f"{name!r} is not a device name; {_ACCEPTED}")
    job = (match["job"] or "localhost").lower()
    if job not in ("localhost", "worker") or int(match["replica"] or 0) or (job == "localhost" and int(match["task"] or 0)):
        raise InvalidArgumentError(
            f"device {name!r} names a task that is not a rank: rank R is /job:worker/replica:0/task:R, and /job:localhost is "
            f"the calling rank; {_ACCEPTED}"
        )
    if job == "worker" and match["task"] is None:
        raise InvalidArgumentError(f"device {name!r} does not name a task; {_ACCEPTED}")
    return DeviceSpec(match["kind"].upper(), int(match["index"] or 0), int(match["task"]) if job == "worker" else None)


def device_name(rank: int) -> str:
    """Return the full name of a rank's device."""
    return str(DeviceSpec(parse_device(own_device()).kind, rank=rank))


def ranks_of(name: object, world: World) -> tuple[int, ...]:
    """Return the ranks of a world that have the device of this name: one rank, or all if each has its own."""
    device = parse_device(name)
    driven = parse_device(own_device()).kind
    if device.kind not in ("", driven):
        other = "ranks compute on CPUs here" if driven == "CPU" else "ranks compute on GPUs here, unless MPISTRAT_DEVICE=cpu"
        raise InvalidArgumentError(f"device {name!r} does not exist: {other}; {_accepted(world)}")
    if device.index:
        raise InvalidArgumentError(f"device {name!r} does not exist: each rank drives one device; {_accepted(world)}")
    if device.rank is None:
        return tuple(range(world.size))
    if device.rank >= world.size:
        raise InvalidArgumentError(f"device {name!r} does not exist: there is no rank {device.rank}; {_accepted(world)}")
    return (device.rank,)


def _accepted(world: World) -> str:
    others = "rank:0" if world.size == 1 else f"rank:0 to rank:{world.size - 1}"
    return f"accepted are {own_device()} (each rank's own) and {others}"
