"""mpistrat completion: a script that lets a shell complete commands, options and their values. It is made by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from mpistrat.errors import LaunchError

__all__ = ["add_arguments", "execute"]

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mpistrat completion``."""
    parser.description = (
        'Print a script that lets a shell complete commands and options. For bash: eval "$(mpistrat completion bash)" in '
        "~/.bashrc, or print it into a file and source that, which starts faster. It needs the package shtab."
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def execute(arguments: argparse.Namespace) -> int:
    """Print the script.

    Parameters
    ----------
    arguments : Namespace
        With ``make_parser``, which returns the parser of all commands.

    Raises
    ------
    LaunchError
        If shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise LaunchError(f"scripts for shells are made by shtab ({error}): pip install shtab") from None
    parser = arguments.make_parser()
    for action in _actions(parser):
        if action.type is Path or action.dest == "program":
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of all commands, whose descriptions become short."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for meaning in action._choices_actions:
                command = action.choices[meaning.dest]
                command.description = meaning.help
                yield from _actions(command)
