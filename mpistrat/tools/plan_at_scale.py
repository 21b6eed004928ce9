"""``mpistrat plan --scale``: predicted times on up to 10 000 nodes, as a table and as a figure."""

from __future__ import annotations

from pathlib import Path

from mpistrat.algorithms.cost import CostModel
from mpistrat.algorithms.scale import PREDICTORS, assumptions_text, predict_scale
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.topology.world import World

__all__ = ["NODES", "scale_report"]

NODES = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 10_000)


def scale_report(world: World, num_bytes: int, model: CostModel, plot: Path | None) -> str:
    """Return the table with its assumptions; draw the figure if a file is named.

    Raises
    ------
    InvalidArgumentError
        If nodes have different numbers of ranks.
    LaunchError
        If there is no matplotlib for the figure.
    """
    if not world.is_uniform:
        raise InvalidArgumentError(f"--scale needs the same number of ranks on each node, such as 1024x8; got {world.shape}")
    nodes, ranks = sorted({*NODES, world.num_nodes}), world.local_sizes[0]
    found = [predict_scale(count, ranks, num_bytes, model) for count in nodes]
    if plot is not None:
        _draw(plot, nodes, found, _title(ranks, num_bytes), model)
    rows = [
        (name, *(format_seconds(seconds[name]) for count, seconds in zip(nodes, found, strict=True) if count > 1))
        for name in PREDICTORS
    ]
    head = ("nodes", *(str(count) for count in nodes if count > 1))
    table = format_table([head, *rows], right=range(1, len(head)))
    return f"{_title(ranks, num_bytes)}, predicted\n\n{table}\n\nAssumed: {assumptions_text(model)}"


def _title(ranks: int, num_bytes: int) -> str:
    return f"all-reduce of {format_bytes(num_bytes)}, {format_count(ranks, 'rank')} on each node"


def _draw(path: Path, nodes: list[int], found: list[dict[str, float]], title: str, model: CostModel) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise LaunchError(f"--plot needs matplotlib ({error}): pip install matplotlib, or leave out --plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    for name in PREDICTORS:
        style = "-" if "mpistrat" in name else "--"
        axes.plot(nodes[1:], [seconds[name] for seconds in found[1:]], f"o{style}", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("nodes")
    axes.set_ylabel("predicted seconds")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.supxlabel(f"Assumed: {assumptions_text(model)}", fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
