"""The kinds of disagreement, by what differs: one module each."""

from tests.disagreements.kinds import absent, arguments, arrays, drawn, legal, options, order, state, structures, verbs
from tests.disagreements.kinds.registry import KINDS, Kind

__all__ = ["KINDS", "Kind"]
_ENTERED = (absent, arguments, arrays, drawn, legal, options, order, state, structures, verbs)
