"""MadeByScope: has the strategy make a variable, where its variables are of another kind: those that servers keep."""

from __future__ import annotations

import inspect
from typing import Any

from mpistrat.context.stack import get_strategy

__all__ = ["MadeByScope"]


class MadeByScope(type):
    """The metaclass of `mpistrat.Variable`: calling that calls ``create_variable`` of the strategy, if it has one."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """What the class is called with, as its own variables are made."""
        made = inspect.signature(cls.__init__)  # type: ignore[misc]
        return made.replace(parameters=list(made.parameters.values())[1:], return_annotation=made.empty)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a new variable."""
        create = getattr(get_strategy().extended, "create_variable", None)
        return super().__call__(*args, **kwargs) if create is None else create(*args, **kwargs)
