"""Host lists and task counts in SLURM's compressed notation.

``n[009-011],login`` is n009, n010, n011, login; ``3(x2),2,1`` is 3, 3, 2, 1. The order is that of the list, which is the
order of ranks; leading zeros are kept.

Invariant: no MPI and no environment here.
"""

from __future__ import annotations

import re
from itertools import product

from mpistrat.errors import InvalidArgumentError

_HOSTS = "a host list is NAME,NAME,…, where a name may hold ranges in brackets: n[009-011,20],rack[0-1]n[1-2]"
_TASKS = "a list of task counts is COUNT or COUNT(xNODES), joined by commas: 3(x2),2,1"


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a host list, in its order.

    If a name has several brackets, the last one varies fastest: ``rack[0-1]n[1-2]`` begins with rack0n1, rack0n2.
    """
    return [host for name in _names(text) for host in _expanded(name, text)]


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks on each node."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InvalidArgumentError(f"{text!r} holds {part!r}; {_TASKS}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _names(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    names = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],\s])+", text)
    if not names or ",".join(names) != text.strip():
        raise InvalidArgumentError(f"{text!r} cannot be read: a name is empty, or brackets are not paired; {_HOSTS}")
    return names


def _expanded(name: str, text: str) -> list[str]:
    # parts with odd indices were in brackets
    parts = re.split(r"\[(.*?)\]", name)
    choices = [_numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise InvalidArgumentError(f"{text!r} holds the range {part!r}, which is neither NUMBER nor LOW-HIGH; {_HOSTS}")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
