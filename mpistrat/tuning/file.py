"""Tuning files: where they are cached, and how all ranks get the cost model that rank 0 has read.

Invariant: only rank 0 accesses files, and a bad one never stops a program: it is logged, and the built-in constants hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mpistrat import cache, settings
from mpistrat.algorithms.cost import DEFAULT, CostModel
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.logger import logger
from mpistrat.topology.world import World
from mpistrat.tuning.measure import Make, measure
from mpistrat.tuning.model import Conditions, Measurement, Tuning, present_conditions


def tuning_path(conditions: Conditions) -> Path:
    """Return the file for these conditions: the one that MPISTRAT_TUNING names, or one in `cache.folder`."""
    named = settings.TUNING.read()
    return cache.folder() / conditions.file_name if named.lower() in ("auto", "off", "measure") else Path(named).expanduser()


def kept() -> list[tuple[Path, Tuning | None, str]]:
    """Return the file that MPISTRAT_TUNING names, or those in `cache.folder`, and what each holds, or why it cannot be used."""
    named, found = settings.TUNING.read(), list[tuple[Path, Tuning | None, str]]()
    in_folder = named.lower() in ("auto", "off", "measure")
    for path in sorted(cache.folder().glob("*.json")) if in_folder else [Path(named).expanduser()]:
        try:
            found.append((path, Tuning.from_document(cache.read(path)), ""))
        except (OSError, ValueError) as error:
            found.append((path, None, str(error)))
    return found


def read(path: Path, world: World, conditions: Conditions) -> CostModel | None:
    """Return the model of a file; None if it does not exist, or cannot be used, which is logged."""
    try:
        tuning = Tuning.from_document(cache.read(path), world)
        if tuning.conditions != conditions:
            raise ValueError(f"it was measured under other conditions: {_difference(tuning.conditions, conditions)}")
        return tuning.model(str(path))
    except (FileNotFoundError, NotADirectoryError):
        if path.name == conditions.file_name:
            return None
        logger.warning(
            f"MPISTRAT_TUNING names {path}, which does not exist: mpistrat tune writes it; the built-in constants are used"
        )
    except (OSError, ValueError, ArithmeticError) as error:
        logger.warning(f"{path} is ignored: {error}; mpistrat tune writes it anew")
    return None


def shared_model(hierarchy: Hierarchy, make: Make) -> CostModel:
    """Return the cost model for ``auto``, the same on all ranks: see the setting MPISTRAT_TUNING. A collective call.

    `make` is as for `measure`, if this call has to measure.
    """
    if hierarchy.world.size == 1:
        return DEFAULT
    comm = hierarchy.world_group.comm
    found = bcast_or_raise(comm, lambda: _find(hierarchy.world))
    if found is not None:
        return found
    measurements = measure(comm, hierarchy.world, make)
    return bcast_or_raise(comm, lambda: _keep(hierarchy.world, measurements))


def _find(world: World) -> CostModel | None:
    """Return the model for a world; None if it has to be measured."""
    wanted = settings.TUNING.read().lower()
    if wanted == "off":
        return DEFAULT
    try:
        conditions = present_conditions(world)
        model = read(tuning_path(conditions), world, conditions)
    except RuntimeError as error:  # there is no home folder
        logger.warning(f"there is no cache folder for files of mpistrat tune: {error}")
        model = None
    if model is not None or wanted != "measure":
        return model or DEFAULT
    return None


def _keep(world: World, measurements: Sequence[Measurement]) -> CostModel:
    """Cache the measurements, and return their model."""
    tuning = Tuning.of(present_conditions(world), measurements)
    source = "this run"
    try:
        path = tuning_path(tuning.conditions)
        cache.write(tuning.document(), path)
        source = str(path)
        logger.info(f"measured {world}, and wrote {path}")
    except (OSError, RuntimeError) as error:
        logger.warning(f"the measurements could not be cached: {error}")
    return tuning.model(source)


def _difference(found: Conditions, expected: Conditions) -> str:
    pairs = [(name, value, getattr(expected, name)) for name, value in asdict(found).items()]
    return ", ".join(f"{name} {value!r}, here {here!r}" for name, value, here in pairs if value != here)
