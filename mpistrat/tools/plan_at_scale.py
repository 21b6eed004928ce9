"""``mpistrat plan --scale``: predicted times on up to 10 000 nodes, as a table and as a figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.algorithms.cost import CostModel
from mpistrat.algorithms.scale import PREDICTORS, assumptions_text, predict_scale
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.topology.world import World

__all__ = ["NODES", "AtScale"]

NODES = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 10_000)


@dataclass(frozen=True)
class AtScale:
    """Predicted times of an all-reduce on more and more nodes.

    Attributes
    ----------
    ranks : int
        Ranks on each node.
    num_bytes : int
        Size of the buffer on each rank.
    model : CostModel
        What predicts.
    seconds : dict
        Number of nodes -> name of the algorithm -> predicted seconds.
    """

    ranks: int
    num_bytes: int
    model: CostModel
    seconds: dict[int, dict[str, float]]

    @classmethod
    def predict(cls, world: World, num_bytes: int, model: CostModel) -> AtScale:
        """Predict for NODES, and for the number of nodes of a world.

        Raises
        ------
        InvalidArgumentError
            If its nodes have different numbers of ranks.
        """
        if not world.is_uniform:
            raise InvalidArgumentError(
                f"--scale needs the same number of ranks on each node, such as 1024x8; got {world.shape}"
            )
        nodes, ranks = sorted({*NODES, world.num_nodes}), world.local_sizes[0]
        return cls(ranks, num_bytes, model, {count: predict_scale(count, ranks, num_bytes, model) for count in nodes})

    def text(self) -> str:
        """Return the table with its assumptions."""
        nodes = [count for count in self.seconds if count > 1]
        rows = [(name, *(format_seconds(self.seconds[count][name]) for count in nodes)) for name in PREDICTORS]
        head = ("nodes", *map(str, nodes))
        table = format_table([head, *rows], right=range(1, len(head)))
        return f"{self._title}, predicted\n\n{table}\n\nAssumed: {assumptions_text(self.model)}"

    def document(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {
            "ranks_per_node": self.ranks,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "assumed": assumptions_text(self.model),
        }

    def draw(self, path: Path) -> None:
        """Draw the figure.

        Raises
        ------
        LaunchError
            If there is no matplotlib.
        """
        try:
            import matplotlib
        except ImportError as error:
            raise LaunchError(f"--plot needs matplotlib ({error}): pip install matplotlib, or leave out --plot") from None
        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
        nodes = [count for count in self.seconds if count > 1]
        for name in PREDICTORS:
            style = "-" if "mpistrat" in name else "--"
            axes.plot(nodes, [self.seconds[count][name] for count in nodes], f"o{style}", markersize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("nodes")
        axes.set_ylabel("predicted seconds")
        axes.set_title(self._title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.supxlabel(f"Assumed: {assumptions_text(self.model)}", fontsize=7)
        figure.savefig(path, dpi=120)
        plt.close(figure)

    @property
    def _title(self) -> str:
        return f"all-reduce of {format_bytes(self.num_bytes)}, {format_count(self.ranks, 'rank')} on each node"
