"""``mpistrat demo``: train a small network on several ranks of this machine, and show topology, plan and throughput."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

from mpistrat.communicator.options import WIRE_DTYPES
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.tools import run
from mpistrat.topology.world import World

NEEDED = {"rich": "rich", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mpistrat demo``."""
    run.add_rank_options(
        parser,
        ranks="number of ranks (default: as many as --nodes has, or 4)",
        nodes="shape of the virtual nodes: 2x2, 3+1 (default: two equal ones)",
    )
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="passes over the training images (default: 8)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("mpistrat-demo"),
        metavar="DIR",
        help="folder for plot and timeline (default: mpistrat-demo)",
    )
    parser.add_argument("--wire-dtype", choices=WIRE_DTYPES, help="dtype of gradients between nodes (default: not cast)")
    parser.add_argument(
        "--error-feedback", action="store_true", help="with --wire-dtype: add the rounding error of a cast in the next step"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Check all arguments, then start the ranks and wait for them."""
    for name in ("ranks", "epochs"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InvalidArgumentError(f"--{name} must be at least 1; got {value}")
    if arguments.error_feedback and not arguments.wire_dtype:
        raise InvalidArgumentError(
            f"--error-feedback needs a --wire-dtype: {' or '.join(WIRE_DTYPES)}; without a cast there is no rounding error"
        )
    nodes = arguments.nodes or _two_nodes(arguments.ranks or 4)
    world = World.from_shape(nodes, arguments.ranks)
    _check_packages()
    folder = _make_folder(arguments.out)
    # a rank cannot find out itself: mpiexec reads its output, and may give it a pseudo-terminal
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    options = ["--epochs", str(arguments.epochs), "--out", str(folder), "--width", str(width)]
    options += ["--wire-dtype", arguments.wire_dtype] if arguments.wire_dtype else []
    options += ["--error-feedback"] if arguments.error_feedback else []
    return run.start(["-m", "mpistrat.tools.demo_rank", *options], world.size, nodes)


def _two_nodes(num_ranks: int) -> str:
    first = -(-num_ranks // 2)
    return f"{first}+{num_ranks - first}" if num_ranks > 1 else "1x1"


def _check_packages() -> None:
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise LaunchError(f"the demo needs {', '.join(missing)}, which is not installed: pip install '.[demo]' in the checkout")


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"--out {folder} cannot be created as a folder: {error.strerror}") from None
    return folder
