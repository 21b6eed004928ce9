"""Which cases there are: all of them, and the quick selection of the tests."""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Iterator

from tests.disagreements.case import Plan
from tests.disagreements.kinds import KINDS, Kind

SHAPES = ("1x2", "2x2", "1x4", "3+1")


def plan_of(kind: Kind, count: int, warm: bool, ranks: int, seed: int = 0) -> Plan:
    """Return a case; its odd rank is always the same one, and first and warm have different ones."""
    odd = zlib.crc32(f"{kind.name} {count} {seed}".encode()) + warm
    return Plan(kind.name, count, warm, odd % ranks, seed)


def all_plans(ranks: int, names: Collection[str] | None = None) -> Iterator[Plan]:
    """Yield every case of some kinds, or of all."""
    for kind in KINDS.values():
        if names is None or kind.name in names:
            for count in kind.sizes:
                for warm in (False, True):
                    yield plan_of(kind, count, warm, ranks)


def quick_plans(ranks: int, names: Collection[str] | None = None, share: float = 1.0) -> list[Plan]:
    """Return one small and one large case of each kind, one first and one warm; of a share of all, always the same."""
    plans = []
    for kind in KINDS.values():
        if not kind.sizes or (names is not None and kind.name not in names):
            continue
        draw = random.Random(f"{kind.name} {ranks}")
        if draw.random() >= share:
            continue
        small, large = (draw.choice(sizes) for sizes in (kind.sizes[:2], kind.sizes[-3:]))
        warm = draw.random() < 0.5
        plans.append(plan_of(kind, small, warm, ranks))
        if large not in (small, 4_000_000):
            plans.append(plan_of(kind, large, not warm, ranks))
    return plans


def drawn_plans(name: str, ranks: int, count: int, most: int, first_seed: int = 1) -> Iterator[Plan]:
    """Yield so many cases of a kind that draws what it does; each a few elements or up to `most`."""
    for seed in range(first_seed, first_seed + count):
        draw = random.Random(seed)
        yield plan_of(KINDS[name], draw.choice((10, 1000, 20_000, most)), draw.random() < 0.5, ranks, seed)
