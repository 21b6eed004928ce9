"""Tuning files: where they are cached, and how all ranks get the cost model that rank 0 has read.

Invariant: only rank 0 accesses files, and a bad one never stops a program: it is logged, and the built-in constants hold.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mpistrat import cache, settings
from mpistrat.algorithms.cost import DEFAULT, CostModel
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.logger import logger
from mpistrat.topology.world import World
from mpistrat.tuning.model import Conditions, Tuning, present_conditions

_NO_PATHS = ("auto", "off")


def tuning_path(conditions: Conditions) -> Path:
    """Return the file for these conditions: the one that MPISTRAT_TUNING names, or one in `cache.folder`."""
    named = settings.TUNING.read()
    return cache.folder() / conditions.file_name if named.lower() in _NO_PATHS else Path(named).expanduser()


def kept() -> list[tuple[Path, Tuning | None, str]]:
    """Return the file that MPISTRAT_TUNING names, or those in `cache.folder`, and what each holds, or why it cannot be used."""
    named, found = settings.TUNING.read(), list[tuple[Path, Tuning | None, str]]()
    in_folder = named.lower() in _NO_PATHS
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


def shared_model(hierarchy: Hierarchy) -> CostModel:
    """Return the cost model for ``auto``, the same on all ranks: see the setting MPISTRAT_TUNING. A collective call."""
    if hierarchy.world.size == 1:
        return DEFAULT
    return bcast_or_raise(hierarchy.world_group.comm, lambda: _find(hierarchy.world))


def _find(world: World) -> CostModel:
    if settings.TUNING.read().lower() == "off":
        return DEFAULT
    try:
        conditions = present_conditions(world)
        return read(tuning_path(conditions), world, conditions) or DEFAULT
    except RuntimeError as error:  # there is no home folder
        logger.warning(f"there is no cache folder for files of mpistrat tune: {error}")
        return DEFAULT


def _difference(found: Conditions, expected: Conditions) -> str:
    pairs = [(name, value, getattr(expected, name)) for name, value in asdict(found).items()]
    return ", ".join(f"{name} {value!r}, here {here!r}" for name, value, here in pairs if value != here)
