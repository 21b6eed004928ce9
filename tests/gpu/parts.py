"""Evidence of several runs, merged: NCCL comes in one version at a time, and a GPU may be free for minutes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

__all__ = ["DIFFERS", "FAILED", "OK", "SKIPPED", "merged"]

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
DIFFERS = "differs between parts"


def merged(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Join parts of evidence.

    Parameters
    ----------
    parts : sequence of mapping
        Each as a run wrote it, or joined before.
    names : sequence of str
        Of all probes there are, in their order.

    Returns
    -------
    dict
        The circumstances of the newest part, and of each name the newest case; one that was skipped gives way to one that ran.
        ``parts`` has the circumstances of all, and each case says by ``part`` which are its own. A source that is not the
        same in all parts is DIFFERS: the evidence does not speak for it.
    """
    ordered = sorted(chain.from_iterable(map(_split, parts)), key=_ended)
    best: dict[str, dict[str, Any]] = {}
    for index, part in enumerate(ordered):
        for case in part["cases"]:
            if case["outcome"] != SKIPPED or best.get(case["name"], case)["outcome"] == SKIPPED:
                best[case["name"]] = {**case, "part": index}
    kept = [{name: value for name, value in part.items() if name != "cases"} for part in ordered]
    sources = [part["sources"] for part in kept]
    return {
        **kept[-1],
        "sources": {
            path: found.pop() if len(found := {one.get(path) for one in sources}) == 1 else DIFFERS
            for path in sorted(set().union(*sources))
        },
        "seconds": sum(part["seconds"] for part in kept),
        "is_complete": set(names) <= best.keys(),
        "parts": kept,
        "cases": sorted(best.values(), key=lambda case: names.index(case["name"]) if case["name"] in names else len(names)),
    }


def _split(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a part was joined from; itself, if from nothing."""
    return [
        {**circumstances, "cases": [case for case in part["cases"] if case["part"] == index]}
        for index, circumstances in enumerate(part.get("parts", []))
    ] or [part]


def _ended(part: Mapping[str, Any]) -> str:
    return max((case["at"] for case in part["cases"] if "at" in case), default=str(part["date"]))
