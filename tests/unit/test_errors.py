"""The exceptions: the tree that is drawn is the tree there is, and each is what a caller would expect to catch."""

from __future__ import annotations

import re

import pytest

from mpistrat import errors
from mpistrat.errors import MpistratError

DRAWN = re.compile(r"^([│├└─ ]*)(\w+)(?: \((\w+)\))?(?:   .*)?$", flags=re.MULTILINE)


def drawn() -> dict[str, tuple[str, str]]:
    """Return, for each error in the drawing, its parent and the builtin in brackets."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str, str]] = {}
    path: list[str] = []
    for branch, name, builtin in DRAWN.findall(errors.__doc__.partition("\n\n")[2]):
        depth = len(branch) // 4
        path[depth:] = [name]
        found[name] = (path[depth - 1] if depth else "", builtin)
    return found


def test_the_drawing_names_every_error() -> None:
    assert sorted(drawn()) == errors.__all__ == sorted(errors.__all__)


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "MpistratError"])
def test_an_error_is_where_it_is_drawn(name: str) -> None:
    parent, builtin = drawn()[name]
    bases = [base.__name__ for base in getattr(errors, name).__bases__]
    assert bases == [parent, *([builtin] if builtin else [])]


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_is_explained_and_says_what_it_is_told(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, MpistratError)
    assert kind.__doc__
    assert str(kind("rank 5: found this, do that")) == "rank 5: found this, do that"


def test_only_agreement_errors_are_raised_on_every_rank() -> None:
    everywhere = [name for name in errors.__all__ if getattr(errors, name)("").raised_everywhere]
    assert everywhere == ["AgreementError"]
