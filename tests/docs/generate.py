"""Write the pages, and the parts of pages, that follow from the code: ``python -m tests.docs.generate``."""

import argparse
import contextlib
import importlib
import inspect
import io
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mpistrat import errors
from mpistrat.settings import SETTINGS, Setting
from mpistrat.text import format_bytes
from mpistrat.tools import cli
from tests.benchmarks.pages import markdown, with_results
from tests.docs.pages import ROOT, Command, blocks, pages
from tests.docs.surface import api_names, described, home
from tests.docs.tf_names import ABSENT, DIFFERENT, SAME, Name

_NOTE = "<!-- Written by python -m tests.docs.generate; edit the code instead. -->\n"


def main() -> None:
    for path, text in stale().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


def stale() -> dict[Path, str]:
    """Return what the pages that are not current should say."""
    wanted = generated()
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def generated() -> dict[Path, str]:
    """Return every page that follows from the code, or from what was measured, whole or in part."""
    whole = {ROOT / "docs/reference" / name: _NOTE + make() for name, make in _PAGES.items()}
    others = [page for page in pages() if page.exists() and page not in whole]
    return whole | {page: with_results(_with_plans(_with_parts(page.read_text()))) for page in others}


def _settings() -> str:
    rows = [(f"`{row.name}`", _accepts(row), _default(row), row.meaning) for row in SETTINGS]
    return (
        "# Settings\n\nEnvironment variables, read when they are first needed; a communicator keeps those that it was made "
        "with. Every rank reads its own, so set the same values on all ranks; `mpistrat run` and `mpiexec` on one "
        "machine export them, for several hosts see your launcher's manual. An invalid value "
        "raises `SettingError`, which lists the accepted ones; 1, true and yes mean on, 0, false and no mean off.\n\n"
        f"{_table(('variable', 'accepted', 'default', 'meaning'), rows)}"
    )


def _accepts(setting: Setting[Any]) -> str:
    """Return what a setting accepts, in the words of its own refusal."""
    if setting.parse is str:
        return "text"
    if isinstance(setting.default, bool):
        return "on, off"
    try:
        setting.parse("?")
    except ValueError as error:
        return re.sub(r"^.*?: | (is|are) accepted", "", str(error))
    raise AssertionError(f"{setting.name} accepts a question mark")


def _default(setting: Setting[Any]) -> str:
    if setting.default is None:
        return "not set"
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    if setting.name.endswith("_BYTES") and setting.default:
        return format_bytes(setting.default).replace(" ", "")
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default) or "empty"


def _errors() -> str:
    kinds = [getattr(errors, name) for name in errors.__all__]
    bases = {kind: ", ".join(f"`{base.__name__}`" for base in kind.__bases__) for kind in kinds}
    rows = [(f"`{kind.__name__}`", bases[kind], (inspect.getdoc(kind) or "").split("\n")[0]) for kind in kinds]
    return (
        "# Errors\n\nAll in `mpistrat.errors`. Each is also a built-in exception. A message says where it happened, what was "
        f"asked, what was found, and what to do.\n\n{_table(('error', 'is a', 'raised when'), rows)}"
    )


def _command_line() -> str:
    parser = cli.make_parser("*")
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parts = [_command(name, commands.choices[name]) for name in cli.COMMANDS]
    summary = _table(
        ("command", "what it does"),
        [(f"[`mpistrat {name}`](#mpistrat-{name})", meaning) for name, meaning in cli.COMMANDS.items()],
    )
    return (
        "# Command line\n\n`mpistrat COMMAND`, or `python -m mpistrat COMMAND`. Invalid arguments end with exit code 2 before "
        f"anything is started.\n\n{summary}\n" + "\n".join(parts)
    )


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = [_argument(action) for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    usage = f"```text\n{parser.usage}\n```\n\n" if parser.usage else ""
    return f"## mpistrat {name}\n\n{_sentence(parser.description or '')}\n\n{usage}{_table(('argument', 'meaning'), rows)}"


def _argument(action: argparse.Action) -> tuple[str, str]:
    names = ", ".join(action.option_strings) or action.dest
    value = f" {action.metavar}" if action.option_strings and action.metavar else ""
    choices = f" ({', '.join(action.choices)})" if action.choices and not action.metavar else ""
    return f"`{names}{value}`", f"{action.help}{choices}"


def _api() -> str:
    sections: dict[str, dict[str, str]] = {title: {} for title in _SECTIONS}
    for name in api_names():
        package = home(name).split(".")[1]
        title = next((title for title, packages in _SECTIONS.items() if package in packages), "Other libraries")
        sections.setdefault(title, {})[f"`{name}`"] = described(name)
    parts = [f"## {title}\n\n{_table(('name', 'what it is'), rows.items())}" for title, rows in sections.items()]
    return (
        "# Python API\n\n`import mpistrat` starts neither MPI nor CUDA. Names are below `mpistrat`; its errors have "
        "[a page of their own](errors.md). Parameters, defaults and what is raised are in the docstrings, "
        "`help(mpistrat.Strategy.run)`, from which the site has a page for each name.\n\n" + "\n".join(parts)
    )


def _tf_names() -> str:
    different = [(_spellings(names), remark) for remark, names in DIFFERENT]
    absent = [(_spellings(names), reason) for reason, names in ABSENT]
    return (
        "# Names of tf.distribute\n\nA program for `tf.distribute` keeps its names. This page lists, without that prefix, "
        f"those that differ, and those that are not here. {len(SAME)} more are the same, also those that TensorFlow has "
        "deprecated, which warn; what each does is in the [API](api.md).\n\nThree rules explain most differences:\n\n"
        "- One rank is one replica. So there is one component of each value, and one input pipeline, on each rank.\n"
        "- Every collective is a call of all ranks, with the same arguments; where they differ, all ranks raise.\n"
        "- Values may be nests, and operations MIN, MAX and PROD too.\n\n"
        f"## Same name, with a difference\n\n{_table(('TensorFlow', 'here'), different)}\n"
        f"## Not here\n\n{_table(('TensorFlow', 'why'), absent)}"
    )


def _spellings(names: Iterable[Name]) -> str:
    """Return the names without their arguments, and where they are here if that is elsewhere."""
    short = [(re.sub(r"\(.+\)", "()", name.spelling), name) for name in names]
    return ", ".join(f"`{text}`" + (f" as `{name.path}`" if name.path not in name.spelling else "") for text, name in short)


def _reduce_ops() -> str:
    """Return the table in the docstring of `reduction` as a table of Markdown."""
    lines = (importlib.import_module("mpistrat.reduction").__doc__ or "").splitlines()
    rules = [index for index, line in enumerate(lines) if line.startswith("===")]
    spans = [match.span() for match in re.finditer("=+", lines[rules[0]])]
    lines = [line for line in lines[rules[0] + 1 : rules[2]] if "===" not in line]
    cells = [tuple(line[start:stop].strip() for start, stop in spans) for line in lines]
    return _table(cells[0], cells[1:])


# What the names of the API page are about, and the packages that they come from.
_SECTIONS = {
    "Strategies": ("strategy",),
    "Communicators": ("communicator", "execution", "reduction"),
    "Variables": ("state",),
    "Datasets": ("inputs",),
    "Contexts and distributed values": ("context",),
    "Cross-device operations": ("cross_device",),
    "Clusters": ("cluster", "cluster_resolver"),
    "Parameter servers": ("parameter_server", "experimental"),
    "Checkpoints": ("checkpoint", "launch"),
}
_PAGES: dict[str, Callable[[], str]] = {
    "settings.md": _settings,
    "errors.md": _errors,
    "command-line.md": _command_line,
    "api.md": _api,
    "tf-names.md": _tf_names,
}
# What stands between <!-- generated: NAME --> and <!-- end --> in a page written by hand.
_PARTS: dict[str, Callable[[], str]] = {"operations": _reduce_ops}


def _with_parts(text: str) -> str:
    def made(match: re.Match[str]) -> str:
        return f"{match[1]}{_PARTS[match[2]]()}{match[3]}"

    return re.sub(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", made, text, flags=re.DOTALL)


def _with_plans(text: str) -> str:
    """Return a page in which the output below each ``mpistrat plan`` is what it prints now."""
    for block in blocks(text):
        if block.language == "console":
            for command in block.commands():
                if command.line.startswith("mpistrat plan ") and command.output:
                    text = text.replace(_shown(command), _shown(Command(command.line, _printed(command.line))))
    return text


def _shown(command: Command) -> str:
    return f"$ {command.line}\n{command.output}"


def _printed(line: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cli.main(shlex.split(line)[1:])
    return output.getvalue()


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    return markdown([list(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)])


if __name__ == "__main__":
    main()
