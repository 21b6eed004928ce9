"""mpistrat checkpoint: list the checkpoints of a directory, show what one holds, and read it whole to compare checksums."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mpistrat.checkpoint import files
from mpistrat.checkpoint.files import Manifest
from mpistrat.errors import CheckpointError
from mpistrat.text import format_bytes, format_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("action", choices=("list", "show", "verify"), help="what to do")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint, or a directory of them")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Print what was asked for; 1 if a checkpoint is not whole, or there is none."""
    is_one = (arguments.directory / files.MANIFEST).exists()
    try:
        folders = [arguments.directory] if is_one else files.find_checkpoints(arguments.directory)
    except CheckpointError as error:
        print(f"mpistrat checkpoint: {error}", file=sys.stderr)
        return 1
    if not folders:
        print(f"mpistrat checkpoint: {arguments.directory} holds no checkpoint", file=sys.stderr)
        return 1
    rows = [_row(folder, arguments.action == "verify") for folder in (folders[-1:] if arguments.action == "show" else folders)]
    if arguments.json:
        print(json.dumps([{key: value for key, value in row.items() if key != "manifest"} for row in rows]))
    elif arguments.action == "show":
        _show(rows[0])
    else:
        for row in rows:
            print(f"{row['path']}  {row.get('error') or row['text']}")
    return int(any("error" in row for row in rows))


def _row(folder: Path, reads_all: bool) -> dict[str, Any]:
    try:
        manifest = files.verify(folder) if reads_all else files.read_manifest(folder)
    except CheckpointError as error:
        return {"path": str(folder), "error": str(error)}
    text = f"step {manifest.step}, {len(manifest.arrays)} arrays of {format_bytes(manifest.num_bytes)}"
    arrays = {name: spec._asdict() for name, spec in manifest.arrays.items()}
    row = {"path": str(folder), "step": manifest.step, "ranks": manifest.num_ranks, "bytes": manifest.num_bytes}
    return {**row, "arrays": arrays, "text": f"{text}{', whole' if reads_all else ''}", "manifest": manifest}


def _show(row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['path']}  {row['error']}")
        return
    manifest: Manifest = row["manifest"]
    summary = [
        ("path", row["path"]),
        ("step", str(manifest.step)),
        ("written by", f"{manifest.num_ranks} ranks, mpistrat {manifest.version}"),
        ("bytes", format_bytes(manifest.num_bytes)),
    ]
    print(format_table(summary), format_table([(name, str(spec)) for name, spec in manifest.arrays.items()]), sep="\n\n")
