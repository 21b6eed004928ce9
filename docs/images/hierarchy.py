"""Draw hierarchy.png: the three phases of a hierarchical all-reduce on two nodes of two ranks."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

# Of what becomes rail 0 and rail 1: a rank's own contribution, the sum over its node, the sum over all.
COLORS = {"own": ("#dbe8f4", "#f9ead3"), "node": ("#8db4da", "#ecc48b"), "all": ("#2a6fb0", "#c97d1c")}
INK = "#333333"

# Which of the two shards each rank holds after a phase, and how much of the sum is in it: what the label says.
STATES = (
    ("every rank has a gradient", ("ab", "ab", "ab", "ab"), "own"),
    ("intra reduce_scatter", ("a", "b", "a", "b"), "node"),
    ("inter all_reduce", ("a", "b", "a", "b"), "all"),
    ("intra all_gather", ("ab", "ab", "ab", "ab"), "all"),
)
PLACES = ((0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0))  # of ranks 0 to 3 in a panel; a node is a row


def main() -> None:
    """Draw the picture beside this script."""
    figure, panels = plt.subplots(1, len(STATES), figsize=(10, 2.75), layout="constrained")
    for number, (axes, (title, held, contained)) in enumerate(zip(panels, STATES, strict=True)):
        axes.set_title(
            f"{number}. {title}" if number else title, fontsize=11, color=INK, family="monospace" if number else None
        )
        draw_state(axes, held, contained)
        draw_arrows(axes, title)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110, bbox_inches="tight", pad_inches=0.05)


def draw_state(axes: Axes, held: tuple[str, ...], contained: str) -> None:
    """Draw two nodes, and what the ranks on them hold."""
    axes.set(xlim=(-0.25, 1.85), ylim=(-0.2, 1.65), aspect="equal")
    axes.axis("off")
    for node, bottom in ((0, 0.87), (1, -0.13)):
        box = FancyBboxPatch((-0.1, bottom), 1.8, 0.72, boxstyle="round,pad=0.04", facecolor="#f4f4f4", edgecolor="#bbbbbb")
        axes.add_patch(box)
        axes.text(-0.2, bottom + 0.36, f"node{node}", rotation=90, ha="center", va="center", fontsize=8, color="#777777")
    for rank, ((x, y), shards) in enumerate(zip(PLACES, held, strict=True)):
        axes.text(x + 0.3, y - 0.085, f"rank {rank}", ha="center", va="center", fontsize=8, color=INK)
        for index, shard in enumerate("ab"):
            draw_shard(axes, x + 0.3 * index, y, index, shard in shards, contained, rank)


def draw_shard(axes: Axes, x: float, y: float, index: int, is_held: bool, contained: str, rank: int) -> None:
    """Draw one shard of one rank: empty, a contribution of its own, a sum over its node, or over all."""
    color = COLORS[contained][index] if is_held else "white"
    axes.add_patch(Rectangle((x, y), 0.3, 0.42, facecolor=color, edgecolor="white" if is_held else "#cccccc", linewidth=1))
    if is_held:
        text = {"own": str(rank), "node": "0+1" if rank < 2 else "2+3", "all": "Σ"}[contained]
        ink = "white" if contained == "all" else INK
        axes.text(x + 0.15, y + 0.21, text, ha="center", va="center", fontsize=9, color=ink)


def draw_arrows(axes: Axes, title: str) -> None:
    """Draw who exchanges with whom in the phase that led here."""
    across = [((0.65, y + 0.21), (0.95, y + 0.21), "", INK) for y in (0.0, 1.0)]
    along = [((x + 0.3, 0.46), (x + 0.3, 0.88), f"rail {rail}", COLORS["all"][rail]) for rail, x in enumerate((0.0, 1.0))]
    for start, stop, name, color in {"intra": across, "inter": along}.get(title.split()[0], []):
        style = {"arrowstyle": "<|-|>", "mutation_scale": 11, "linewidth": 1.6, "zorder": 5}
        axes.add_patch(FancyArrowPatch(start, stop, color=color, **style))
        axes.text(start[0] + 0.06, 0.73, name, va="center", fontsize=8, color=color, zorder=5)


if __name__ == "__main__":
    main()
