"""Write the pages, and the parts of pages, that follow from the code: ``python -m tests.docs.generate``."""

from __future__ import annotations

import argparse
import ast
import configparser
import contextlib
import importlib
import inspect
import io
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mpistrat import errors, settings
from mpistrat.settings import SETTINGS, Setting
from mpistrat.text import format_bytes
from mpistrat.tools import cli
from tests.benchmarks.pages import with_results
from tests.docs import gpu_page
from tests.docs.pages import ROOT, Command, blocks, pages
from tests.docs.surface import api_names, beyond, described, home
from tests.docs.tf_names import READING, SAME, SECTIONS, Row

__all__ = ["generated", "stale"]

_NOTE = "<!-- Written by python -m tests.docs.generate; edit the code instead. -->\n"


def main() -> None:
    """Write what is not current."""
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
        "# Settings\n\nEnvironment variables, read when they are first needed. Every rank reads its own, so set the same "
        "values on all ranks; `mpistrat run` and `mpiexec` on one machine export them, for several hosts see your launcher's "
        "manual. An invalid value raises `SettingError`, which lists the accepted ones.\n\n"
        f"{_table(('variable', 'accepted', 'default', 'meaning'), rows)}"
    )


def _accepts(setting: Setting[Any]) -> str:
    """Return what a setting accepts, in the words of its own refusal."""
    if setting.parse is str:
        return "text"
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
    if setting.parse is settings.parse_bytes and setting.default:
        return format_bytes(setting.default).replace(" ", "")
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default) or "empty"


def _errors() -> str:
    _, _, tree = (errors.__doc__ or "").partition("\n\n")
    kinds = [getattr(errors, name) for name in errors.__all__]
    rows = [
        (f"`{kind.__name__}`", ", ".join(f"`{base.__name__}`" for base in kind.__bases__), _caption(kind)) for kind in kinds
    ]
    return (
        "# Errors\n\nAll in `mpistrat.errors`. Each also inherits from a built-in exception, which is in brackets. A message "
        "says where it happened, what was asked, what was found, and what to do.\n\n"
        f"```text\n{tree.strip()}\n```\n\n{_table(('error', 'is a', 'raised when'), rows)}"
    )


def _command_line() -> str:
    parser = cli.make_parser("*")
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parts = [_command(name, commands.choices[name]) for name in cli.COMMANDS]
    summary = _table(
        ("command", "what it does"),
        [(f"[`mpistrat {name}`](#mpistrat-{name})", meaning) for name, (_, meaning) in cli.COMMANDS.items()],
    )
    return (
        "# Command line\n\n`mpistrat COMMAND`, or `python -m mpistrat COMMAND`. Invalid arguments end with exit code 2 before "
        f"anything is started.\n\n{summary}\n" + "\n".join(parts)
    )


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = [_argument(action) for action in parser._actions if action.dest != "help"]
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
    counted = [row.status for section in SECTIONS.values() for row in section]
    counts = "; ".join(f"{counted.count(status)} {status}" for status in dict.fromkeys(counted))
    parts = [
        f"## {title}\n\n{_table(('TensorFlow', 'mpistrat', 'status', 'remark'), [_tf_row(row) for row in rows])}"
        for title, rows in SECTIONS.items()
    ]
    added = _table(("mpistrat", "what it is or does"), [_beyond_row(name, thing) for name, thing in beyond().items()])
    return (
        "# Names of tf.distribute\n\nEvery name of `tf.distribute`, without that prefix, and its status here. *Same, with a "
        "difference*: name and arguments are the same, and the remark says what differs, mostly because one rank is one "
        f"replica. Additions to TensorFlow are at the end. In all: {counts}.\n\n"
        + "\n".join([*parts, f"## Beyond TensorFlow\n\n{added}"])
    )


def _tf_row(row: Row) -> tuple[str, str, str, str]:
    if row.status not in (SAME, READING):
        return f"`{row.tf}`", "–", row.status, row.remark
    return f"`{row.tf}`", f"`{row.ours}`", row.status, row.remark or described(row.ours)


def _beyond_row(name: str, thing: Any) -> tuple[str, str]:
    function = getattr(thing, "__func__", thing)
    if not inspect.isfunction(function):
        return f"`{name}`", described(name)
    arguments = [parameter for parameter in inspect.signature(function).parameters if parameter not in ("self", "cls")]
    return f"`{name}({', '.join(arguments)})`", described(name)


def _tree() -> str:
    package = ROOT / "mpistrat"
    flat = [(path.name, _module_caption(path)) for path in sorted(package.glob("*.py"))]
    flat.append(("py.typed", "Tells type checkers that the package is typed."))
    lines = [("mpistrat/", ""), *_branch(flat, "", last=False)]
    folders = _layers_upwards(package)
    for folder in folders:
        last = folder == folders[-1]
        paths = [path for path in sorted(folder.glob("*.*")) if path.suffix in (".py", ".cu") and path.name != "__init__.py"]
        files = [(path.name, _module_caption(path)) for path in paths]
        lines.append((f"{'└' if last else '├'}── {folder.name}/", _module_caption(folder / "__init__.py")))
        lines += _branch(files, "    " if last else "│   ", last=True)
    width = max(len(name) for name, _ in lines) + 2
    return "```text\n" + "".join(f"{name:{width}}{caption}".rstrip() + "\n" for name, caption in lines) + "```\n"


def _branch(files: list[tuple[str, str]], indent: str, last: bool) -> list[tuple[str, str]]:
    return [
        (f"{indent}{'└' if last and index == len(files) - 1 else '├'}── {name}", caption)
        for index, (name, caption) in enumerate(files)
    ]


def _layers_upwards(package: Path) -> list[Path]:
    """Return the folders, the lowest layer first."""
    names = re.findall(r"\w+", " ".join(reversed(_layers())))
    return [package / name for name in names if (package / name).is_dir()]


def _layers() -> list[str]:
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    return configuration["importlinter:contract:layers"]["layers"].split("\n")[1:]


def _module_caption(path: Path) -> str:
    if path.suffix == ".cu":
        return path.read_text().split("\n")[0].removeprefix("// ")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].replace("``", "")


def _reduce_ops() -> str:
    """Return the table in the docstring of `reduction` as a table of Markdown."""
    lines = (importlib.import_module("mpistrat.reduction").__doc__ or "").splitlines()
    rules = [index for index, line in enumerate(lines) if line.startswith("===")]
    spans = [match.span() for match in re.finditer("=+", lines[rules[0]])]
    cells = [
        tuple(line[start:stop].strip() for start, stop in spans) for line in lines[rules[0] + 1 : rules[2]] if "===" not in line
    ]
    return _table(cells[0], cells[1:])


# What the names of the API page are about, and the packages that they come from.
_SECTIONS = {
    "Strategies": ("strategy",),
    "Communicators": ("communicator", "execution", "reduction"),
    "Variables": ("state",),
    "Datasets": ("inputs",),
    "Contexts and distributed values": ("context",),
    "Cross-device operations": ("cross_device",),
    "Clusters": ("cluster",),
    "Parameter servers": ("parameter_server",),
}
_PAGES: dict[str, Callable[[], str]] = {
    "settings.md": _settings,
    "errors.md": _errors,
    "command-line.md": _command_line,
    "api.md": _api,
    "tf-names.md": _tf_names,
}
# What stands between <!-- generated: NAME --> and <!-- end --> in a page written by hand.
_PARTS: dict[str, Callable[[], str]] = {
    "tree": _tree,
    "layers": lambda: "```text\n" + "\n".join(_layers()) + "\n```\n",
    "operations": _reduce_ops,
    "gpu": lambda: _table(("case", "what it shows", "goal", "outcome"), gpu_page.rows(gpu_page.newest())),
}


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


def _caption(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
