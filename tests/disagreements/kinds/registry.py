"""The kinds: what each is, which cases there are of it, and how its cases may end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tests.disagreements.case import Case

SIZES = (1, 10, 20_000, 300_000)
LARGE = (*SIZES, 4_000_000)
TOLD = frozenset({"told"})
MAY_BE_RIGHT = frozenset({"right", "told"})  # ranks differ in what need not change a result


@dataclass(frozen=True)
class Kind:
    """One way to disagree."""

    name: str  # of the function
    family: str  # what it belongs to, for tables
    run: Callable[[Case], None]  # makes the calls of one rank
    sizes: tuple[int, ...]  # numbers of elements it is tried with
    allowed: frozenset[str]  # classes that a case may end in
    alone: bool  # whether the program ends in it: each case has a job of its own
    rewarm: bool  # whether a warm case makes the kind's own calls before; else it makes others
    min_ranks: int  # how many ranks it takes
    says: str  # a pattern of what must be on stderr where the program ends in it

    @property
    def text(self) -> str:
        """What the function says of itself."""
        return (self.run.__doc__ or "").strip()


KINDS: dict[str, Kind] = {}


def kind(
    family: str,
    *,
    sizes: tuple[int, ...] = SIZES,
    allowed: Collection[str] = TOLD,
    alone: bool = False,
    rewarm: bool = True,
    min_ranks: int = 2,
    says: str = r"AgreementError|UnavailableError|DeadlineExceededError",
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Enter a function as a kind under its name."""

    def enter(run: Callable[[Case], None]) -> Callable[[Case], None]:
        name = run.__name__
        KINDS[name] = Kind(name, family, run, sizes, frozenset(allowed), alone, rewarm and not alone, min_ranks, says)
        return run

    return enter


legal = functools.partial(kind, "legal", allowed={"right"})
