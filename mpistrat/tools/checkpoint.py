"""mpistrat checkpoint: list the checkpoints of a directory, show what one holds, or read it whole to compare checksums."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mpistrat.checkpoint import files
from mpistrat.errors import CheckpointError
from mpistrat.text import format_bytes, format_count, format_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "show", "verify"), help="what to do; show takes the newest of several")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a checkpoint, or a directory of them")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Print what was asked for; 1 if a checkpoint is not whole, or there is none."""
    action, directory = arguments.action, arguments.directory
    why = f"{directory} holds no checkpoint"
    try:
        folders = [directory] if (directory / files.MANIFEST).is_file() else files.find_checkpoints(directory)
    except OSError as error:
        folders, why = [], str(error)
    if not folders:
        print(f"mpistrat checkpoint: {why}", file=sys.stderr)
        return 1
    rows = [_row(folder, action == "verify") for folder in (folders[-1:] if action == "show" else folders)]
    if arguments.json:
        print(json.dumps(rows))
    for row in [] if arguments.json else rows:
        found, ending = row.get("arrays", {}), ", whole" if action == "verify" else ""
        what = format_count(len(found), "array")
        told = row.get("error") or f"step {row['step']}, {what} of {format_bytes(row['bytes'])}{ending}"
        print(f"{row['path']}  {told}")
        if action == "show" and found:
            print(f"written by {format_count(row['ranks'], 'rank')}, mpistrat {row['version']}\n")
            print(format_table([(name, f"{spec['dtype']} {spec['shape']}") for name, spec in found.items()]))
    return int(any("error" in row for row in rows))


def _row(folder: Path, reads_all: bool) -> dict[str, Any]:
    try:
        manifest = files.verify(folder) if reads_all else files.read_manifest(folder)
    except CheckpointError as error:
        return {"path": str(folder), "error": str(error)}
    arrays = {name: spec._asdict() for name, spec in manifest.arrays.items()}
    facts = {"step": manifest.step, "ranks": manifest.num_ranks, "version": manifest.version, "bytes": manifest.num_bytes}
    return {"path": str(folder), **facts, "arrays": arrays}
