"""Tuning: the measurements of a cluster in a file, by which ``auto`` chooses.

Invariant: only rank 0 accesses files, and a bad one never stops a program: it is logged, and the built-in limits hold.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import tempfile
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpistrat import settings
from mpistrat.algorithms.planners import NOTHING, PLANNERS, Measured
from mpistrat.errors import LaunchError
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.bootstrap import library_version
from mpistrat.lazy import MPI
from mpistrat.logger import logger
from mpistrat.topology.world import World

FORMAT = 2  # to be increased when algorithms become faster, which makes older measurements useless
# the settings that change the time of a collective
_SHAPING: tuple[settings.Setting[Any], ...] = (
    settings.VIRTUAL_NODES, settings.STRICT, settings.CHUNK_BYTES, settings.MAX_MESSAGE_BYTES,
    settings.INTRA_TRANSPORT, settings.INTER_TRANSPORT, settings.MPI_GPU, settings.PEER_MEMORY,
)  # fmt: skip

ITEM_BYTES = 4

Seconds = dict[str, dict[int, float]]
"""The time of an all-reduce of float32, by algorithm and bytes of the buffer: the median of the slowest rank's."""


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a measurement is valid: the cluster, the MPI, and the rank placement."""

    cluster: str  # SLURM's names of it and its partition, or the host names without their numbers
    processor: str  # its model and number of cores, on rank 0's host
    mpi: str  # name and version of the library
    world: str  # node shape and placement: ``4x2 block``
    settings: str = ""  # those with values other than the default that change times

    @property
    def file_name(self) -> str:
        """A readable file name, made unique by a checksum."""
        readable = re.sub(r"[^a-z0-9+]+", "-", f"{self.cluster} {self.world}".lower()).strip("-")[:60]
        return f"{readable}-{zlib.crc32(json.dumps(asdict(self)).encode()):08x}.json"


@dataclass(frozen=True)
class Tuning:
    """Measured times, their conditions, and the day on which they were measured: ``2026-11-20``."""

    conditions: Conditions
    seconds: Seconds
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())

    def measured(self, source: str) -> Measured:
        """Return what ``auto`` goes by; `source` says where the measurements come from."""
        return Measured(self.seconds, f"{source}, {self.date}")

    def document(self) -> dict[str, Any]:
        """Return the content of the file, for JSON."""
        return {"format": FORMAT, **asdict(self)}

    def write(self, path: Path) -> None:
        """Write the file atomically: a concurrent reader finds either the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new") as new:
            file = Path(new, path.name)
            file.write_text(json.dumps(self.document(), indent=1) + "\n")
            file.replace(path)

    @classmethod
    def from_file(cls, path: Path) -> Tuning:
        """Return the tuning that a file holds; a ValueError says why it holds none, or one of another version."""
        try:
            document = json.loads(path.read_text())
            if document["format"] != FORMAT:
                raise ValueError(f"it has format {document['format']!r}, and this version of mpistrat reads format {FORMAT}")
            conditions = Conditions(**document["conditions"])
            world_like(conditions)  # raises if there is none
            unknown = sorted(set(document["seconds"]) - set(PLANNERS))
            if unknown:
                raise ValueError(f"it names unknown algorithms: {', '.join(unknown)}")
            seconds = {
                name: {int(num_bytes): float(time) for num_bytes, time in times.items()}
                for name, times in document["seconds"].items()
            }
            if not all(num_bytes > 0 and time > 0 for times in seconds.values() for num_bytes, time in times.items()):
                raise ValueError("it holds what is not a positive number")
            return cls(conditions, seconds, str(document["date"]))
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"it is not a file of mpistrat tune ({type(error).__name__}: {error})") from None


def present_conditions(world: World) -> Conditions:
    """Return the present conditions, on rank 0 of `world`. MPI must have been started."""
    slurm = [os.environ[name] for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION") if os.environ.get(name)]
    host = MPI.Get_processor_name()
    shaping = [(setting.name, setting.read(), setting.default) for setting in _SHAPING]
    return Conditions(
        " ".join(slurm) or re.sub(r"[-_]*\d.*", "", host.partition(".")[0]) or host,
        f"{_processor()}, {os.cpu_count()} cores",
        library_version(),
        f"{world.shape} {world.placement}",
        ", ".join(f"{name}={value}" for name, value, default in shaping if value != default),
    )


def folder() -> Path:
    """Return the cache folder, ``$XDG_CACHE_HOME/mpistrat`` or ``~/.cache/mpistrat``; a LaunchError if there is no home."""
    from platformdirs import user_cache_path

    found = user_cache_path("mpistrat")
    if not found.is_absolute():
        raise LaunchError("there is no home folder for files of mpistrat: set HOME, or XDG_CACHE_HOME")
    return found


def tuning_path(conditions: Conditions) -> Path:
    """Return the file for these conditions: the one that MPISTRAT_TUNING names, or one in `folder`."""
    return _named() or folder() / conditions.file_name


def kept() -> tuple[Path, list[tuple[Path, Tuning | None, str]]]:
    """Return a folder, and its tuning files: the path, what the file holds, and why it cannot be used.

    The file is the one that MPISTRAT_TUNING names; where it names none, these are all files in `folder`.
    """
    named, found = _named(), list[tuple[Path, Tuning | None, str]]()
    place = named.parent if named else folder()
    for path in [named] if named else sorted(place.glob("*.json")):
        try:
            found.append((path, Tuning.from_file(path), ""))
        except (OSError, ValueError) as error:
            found.append((path, None, str(error)))
    return place, found


def _named() -> Path | None:
    """Return the file that MPISTRAT_TUNING names, if it does."""
    text = settings.TUNING.read()
    try:
        return None if text.lower() in ("auto", "off") else Path(text).expanduser()
    except RuntimeError as error:
        raise LaunchError(f"{settings.TUNING.name}={text}: {error}") from None


def read(path: Path, conditions: Conditions) -> Measured | None:
    """Return what a file holds; None if it does not exist, or cannot be used, which is logged."""
    try:
        tuning = Tuning.from_file(path)
        if tuning.conditions != conditions:
            raise ValueError(f"it was measured under other conditions: {_difference(tuning.conditions, conditions)}")
        return tuning.measured(str(path))
    except (FileNotFoundError, NotADirectoryError):
        if path.name == conditions.file_name:
            return None
        logger.warning(
            f"MPISTRAT_TUNING names {path}, which does not exist: mpistrat tune writes it; the built-in limits are used"
        )
    except (OSError, ValueError) as error:
        logger.warning(f"{path} is ignored: {error}; mpistrat tune writes it anew")
    return None


def shared_measurements(hierarchy: Hierarchy) -> Measured:
    """Return what ``auto`` goes by, the same on all ranks: see the setting MPISTRAT_TUNING. A collective call."""
    if hierarchy.world.size == 1:
        return NOTHING
    return bcast_or_raise(hierarchy.world_group.comm, lambda: _find(hierarchy.world))


def _find(world: World) -> Measured:
    if settings.TUNING.read().lower() == "off":
        return NOTHING
    try:
        conditions = present_conditions(world)
        return read(tuning_path(conditions), conditions) or NOTHING
    except LaunchError as error:  # there is no such home folder
        logger.warning(str(error))
        return NOTHING


def _difference(found: Conditions, expected: Conditions) -> str:
    pairs = [(name, value, getattr(expected, name)) for name, value in asdict(found).items()]
    return ", ".join(f"{name} {value!r}, here {here!r}" for name, value, here in pairs if value != here)


def world_like(conditions: Conditions) -> World:
    """Return a world of the measured shape and placement; for a mixed one a block one, which is good enough to show."""
    shape, _, placement = conditions.world.partition(" ")
    return World.from_shape(f"{shape}:cyclic" if placement == "cyclic" else shape)


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()
