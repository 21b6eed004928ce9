"""Draw demo_timeline.png from a timeline of ``mpistrat demo``, whose path is the argument: the two steps that took least."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

# Of a rank upwards: what computes, what works inside the node, what works between nodes; each with the beginnings of its names.
COLORS = {
    "the rest of the step: computing": ("step", "#dddddd"),
    "copy in, copy out": ("copy", "#8f8f8f"),
    "intra reduce_scatter, intra all_gather": ("intra", "#2a6fb0"),
    "inter all_reduce": ("inter", "#c97d1c"),
}
HEIGHTS = {"step": (0.0, 0.8), "copy": (0.08, 0.3), "intra": (0.08, 0.3), "inter": (0.42, 0.3)}


def main() -> None:
    """Draw the picture beside this script."""
    rows = json.loads(Path(sys.argv[1]).read_text())["traceEvents"]
    events = [row for row in rows if row["ph"] == "X" and _kind(row) in HEIGHTS]  # collectives have a row of their own, too
    steps = [row for row in events if row["pid"] == 0 and _kind(row) == "step"]
    first, last = min(pairwise(steps), key=lambda pair: pair[0]["dur"] + pair[1]["dur"])
    start, stop = first["ts"], last["ts"] + last["dur"]
    shown = [row for row in events if row["ts"] < stop and row["ts"] + row["dur"] > start]
    figure, axes = plt.subplots(figsize=(10, 3.2), layout="constrained")
    for row in sorted(shown, key=lambda row: list(HEIGHTS).index(_kind(row))):
        bottom, height = HEIGHTS[_kind(row)]
        color = next(color for kind, color in COLORS.values() if kind == _kind(row))
        place = ((row["ts"] - start) / 1e3, row["dur"] / 1e3)
        axes.broken_barh([place], (row["pid"] + bottom, height), facecolor=color, edgecolor="white", linewidth=0.4)
    ranks = sorted({row["pid"] for row in shown})
    axes.set_yticks([rank + 0.4 for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlim(0, (stop - start) / 1e3)
    axes.set_xlabel(f"milliseconds; {first['name']} and {last['name']}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    patches = [Patch(facecolor=color, label=label) for label, (_, color) in COLORS.items()]
    axes.legend(handles=patches, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False, fontsize=9)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def _kind(row: dict[str, Any]) -> str:
    return str(row["name"]).split()[0]


if __name__ == "__main__":
    main()
