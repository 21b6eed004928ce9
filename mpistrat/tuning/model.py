"""Tuning: the measurements of a cluster, as a document that can be cached, and the cost model that they correct."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpistrat import cache, settings
from mpistrat.algorithms.choose import PLANNERS
from mpistrat.algorithms.cost import DEFAULT, CostModel
from mpistrat.launch.bootstrap import library_version
from mpistrat.launch.environment import MOST_RANKS
from mpistrat.topology.world import World
from mpistrat.tuning.corrections import Measurement, corrected
from mpistrat.tuning.gpu_measurements import GpuMeasurements

_MOST_BYTES = 2.0**40
FORMAT = 2  # to be increased when algorithms become faster, which makes older measurements useless
# the settings that change the time of a collective
_SHAPING: tuple[settings.Setting[Any], ...] = (
    settings.VIRTUAL_NODES, settings.STRICT, settings.CHUNK_BYTES, settings.MAX_MESSAGE_BYTES,
    settings.INTRA_TRANSPORT, settings.INTER_TRANSPORT, settings.MPI_GPU, settings.PEER_MEMORY,
)  # fmt: skip


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a measurement is valid: the cluster, the MPI, and the rank placement.

    Attributes
    ----------
    cluster : str
        SLURM's names of it and its partition, or the host names without their numbers.
    processor : str
        Processor model and number of cores of rank 0's host.
    mpi : str
        Name and version of the MPI library.
    world : str
        Node shape and placement: ``4x2 block``.
    settings : str
        Settings with values other than the default that change times.
    """

    cluster: str
    processor: str
    mpi: str
    world: str
    settings: str = ""

    @property
    def file_name(self) -> str:
        """A readable file name, made unique by a checksum."""
        readable = re.sub(r"[^a-z0-9+]+", "-", f"{self.cluster} {self.world}".lower()).strip("-")[:60]
        return f"{readable}-{cache.checksum(self)}.json"


@dataclass(frozen=True)
class Tuning:
    """Measurements, and their conditions.

    Attributes
    ----------
    conditions : Conditions
        Under which it is valid.
    date : str
        When it was measured: ``2026-11-20``.
    links : int
        Of a node, that its rails use at the same time.
    measurements : tuple of Measurement
        All of one world.
    gpus : GpuMeasurements or None
        The same on GPUs, if it was measured there.
    """

    conditions: Conditions
    date: str
    links: int
    measurements: tuple[Measurement, ...]
    gpus: GpuMeasurements | None = None

    @classmethod
    def of(
        cls, conditions: Conditions, measurements: Sequence[Measurement], links: int = 1, gpus: GpuMeasurements | None = None
    ) -> Tuning:
        """Return the tuning of measurements made just now, on nodes with so many links."""
        return cls(conditions, datetime.date.today().isoformat(), links, tuple(measurements), gpus)

    def model(self, source: str) -> CostModel:
        """Return the model for the measured world; `source` says where the measurements come from."""
        model = replace(DEFAULT, links=self.links, source=f"{source}, measured {self.date}")
        model = corrected(model, self.measurements)
        return replace(model, gpu_times=self.gpus.times(self.date)) if self.gpus else model

    def document(self) -> dict[str, Any]:
        """Return the content of the file, for JSON."""
        seconds: dict[str, dict[str, float]] = {}
        for measurement in self.measurements:
            seconds.setdefault(measurement.algorithm, {})[str(measurement.num_bytes)] = measurement.seconds
        return {
            "format": FORMAT,
            "date": self.date,
            "conditions": asdict(self.conditions),
            "links": self.links,
            "seconds": seconds,
            **({"gpus": self.gpus.document()} if self.gpus else {}),
        }

    @classmethod
    def from_document(cls, document: Any, world: World | None = None) -> Tuning:
        """Return the tuning that a file holds.

        Parameters
        ----------
        document : object
            The content of the file, as `document` returned it.
        world : World, optional
            The measured world; by default one with the same shape and placement.

        Raises
        ------
        ValueError
            If it is not a tuning, or one of another version; says what was expected.
        """
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"it has format {document['format']!r}, and this version of mpistrat reads format {FORMAT}")
            conditions = cache.record(Conditions, document["conditions"])
            world = world or _world(conditions)
            unknown = sorted(set(document["seconds"]) - set(PLANNERS))
            if unknown:
                raise ValueError(f"it names unknown algorithms: {', '.join(unknown)}")
            measurements = tuple(
                Measurement(world, algorithm, int(_positive(int(num_bytes), _MOST_BYTES)), _positive(seconds))
                for algorithm, ladder in document["seconds"].items()
                for num_bytes, seconds in ladder.items()
            )
            # files of jobs without GPUs have none
            gpus = GpuMeasurements.from_document(document["gpus"], _positive) if "gpus" in document else None
            return cls(conditions, str(document["date"]), _links(document["links"]), measurements, gpus)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"it is not a file of mpistrat tune ({type(error).__name__}: {error})") from None


def present_conditions(world: World) -> Conditions:
    """Return the present conditions, on rank 0 of `world`. MPI must have been started."""
    from mpi4py import MPI

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


def _positive(number: Any, below: float = float("inf")) -> float:
    if not (type(number) in (int, float) and 0 < number < below):
        raise ValueError(f"it is not a file of mpistrat tune ({number!r} is not a positive number below {below:g})")
    return float(number)


def _links(number: Any) -> int:
    if type(number) is not int or not 1 <= number <= MOST_RANKS:
        raise ValueError(f"it is not a file of mpistrat tune ({number!r} is not a number of links)")
    return number


def _world(conditions: Conditions) -> World:
    """Return a world of this shape; for a mixed placement a block one, which is good enough to show."""
    shape, _, placement = conditions.world.partition(" ")
    return World.from_shape(f"{shape}:cyclic" if placement == "cyclic" else shape)


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()
