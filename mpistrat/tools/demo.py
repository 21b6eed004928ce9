"""``mpistrat demo``: train a small network on several ranks of this machine, and show topology, plan and throughput."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import mpistrat
from mpistrat import settings
from mpistrat.arrays import array_module
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.text import format_bytes, format_count, format_table
from mpistrat.timeline import Timeline
from mpistrat.tools import run, train_digits
from mpistrat.tools.bench import place_text
from mpistrat.topology.world import World

if TYPE_CHECKING:
    from rich.console import Console

NEEDED = {"rich": "rich", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
# wide enough for more than 1 MiB of gradients
HIDDEN, RATE = 4096, 0.03
# the progress bar shows the mean of so many steps, because single steps vary
RECENT = 10
# every scope of a plan; training steps have their own lane
LANES = ("intra", "inter", "world")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run.add_rank_options(
        parser,
        ranks="number of ranks (default: as many as --nodes has, or 4)",
        nodes="shape of the virtual nodes: 2x2, 3+1 (default: two equal ones)",
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save each epoch there, go on after the last one saved")
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="passes over the training images (default: 8)")
    where = "folder for plot and timeline (default: mpistrat-demo)"
    parser.add_argument("--out", type=Path, default=Path("mpistrat-demo"), metavar="DIR", help=where)
    # a rank cannot find out itself: mpiexec reads its output, and may give it a pseudo-terminal
    parser.add_argument("--width", type=int, default=0, help=argparse.SUPPRESS)


def execute(arguments: argparse.Namespace) -> int:
    """Check all arguments, then start the ranks and wait for them."""
    for name in ("ranks", "epochs"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InvalidArgumentError(f"--{name} must be at least 1; got {value}")
    num_ranks = arguments.ranks or 4
    first = -(-num_ranks // 2)
    nodes = arguments.nodes or (f"{first}+{num_ranks - first}" if num_ranks > 1 else "1x1")
    world = World.from_shape(nodes, arguments.ranks)
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise LaunchError(f"the demo needs {', '.join(missing)}: pip install '.[demo]' in the checkout")
    for name, folder in (("out", arguments.out), ("checkpoint", arguments.checkpoint)):
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgumentError(f"--{name} {folder} cannot be created as a folder: {error.strerror}") from None
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    program = ["-m", "mpistrat.tools.demo", "--width", str(width), *arguments.words[1:]]
    return run.start(program, world.size, nodes, {settings.TIMELINE.name: str(arguments.out / "timeline.json")})


class Step(NamedTuple):
    """The measurements of one training step, from the end of the previous one on."""

    epoch: int  # counted from 0
    loss: float  # mean over the images of the global batch
    images: int  # of the global batch
    seconds: float
    communicating_seconds: float  # in which this rank was in a collective: copying, sending or waiting for other ranks


class Meter:
    """Measures steps, and records them on the timeline of this rank's collectives, which it enables."""

    def __init__(self, timeline: Timeline) -> None:
        self.steps: list[Step] = []
        self._timeline = timeline
        self._timeline.enabled = True
        self.start()

    def start(self) -> None:
        """Begin the first step now; what came before is no part of it."""
        self._started = time.perf_counter()
        self._busy_seconds = self._timeline.busy_seconds(LANES)

    def end_step(self, epoch: int, loss: float, images: int) -> Step:
        """End a step now, and return its measurements."""
        self._timeline.record(f"step {len(self.steps)}", "step", self._started)
        now, busy_seconds = time.perf_counter(), self._timeline.busy_seconds(LANES)
        step = Step(epoch, loss, images, now - self._started, busy_seconds - self._busy_seconds)
        self._started, self._busy_seconds = now, busy_seconds
        self.steps.append(step)
        return step


def means(steps: Sequence[Step]) -> tuple[float, float, float]:
    """Return the mean loss of some steps, how many images per second all ranks take, and this rank's share of communication."""
    images, seconds = sum(step.images for step in steps), sum(step.seconds for step in steps)
    loss, communicating = sum(step.loss * step.images for step in steps), sum(step.communicating_seconds for step in steps)
    return loss / images, images / seconds, communicating / seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Train on one of the ranks; print and write the results on rank 0. A collective call."""
    from rich.console import Console

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    communicator, chief = strategy.extended.communicator, strategy.extended.should_save_summary
    console = Console(
        force_terminal=arguments.width > 0, width=arguments.width or None, soft_wrap=True, highlight=False, quiet=not chief
    )
    _introduce(console, communicator)
    meter = Meter(communicator.timeline)
    accuracy = _train(console, strategy, arguments.epochs, arguments.checkpoint, meter)
    if not meter.steps:
        console.print(
            f"all {format_count(arguments.epochs, 'epoch')} were in {arguments.checkpoint}: test accuracy {accuracy:.3f}"
        )
        return
    if chief:
        _plot(arguments.out / "training.png", f"{_sizes(communicator.world)}: test accuracy {accuracy:.3f}", meter.steps)
    _conclude(console, accuracy, meter.steps, arguments.out)


def _introduce(console: Console, communicator: BaseCommunicator) -> None:
    """Show the topology, and the plan for the gradients."""
    from rich.markup import escape

    # the loss and the number of images are reduced together with the gradients
    count = sum(array.size for array in train_digits.first_weights(HIDDEN).values()) + 2
    gradients = array_module().empty(count, np.float32)
    kind = "virtual nodes on" if settings.VIRTUAL_NODES.read() else "real nodes, this is"
    choices = [pack.choice for pack in communicator.explain(gradients).packs]
    facts = [
        ("computed", escape(place_text(communicator))),
        ("gradients", f"{format_bytes(gradients.nbytes)} of float32 on each rank, summed over all ranks in each step"),
        ("plan", str(choices[0].plan) if choices else "one replica: nothing is sent"),
        ("why", choices[0].reason if choices else "there is only one rank"),
    ]
    console.print(
        f"[bold]A network learns handwritten digits on {_sizes(communicator.world)}[/], {kind} {socket.gethostname()}\n"
    )
    console.print(_topology(communicator.world), "", format_table(facts), "", sep="\n")


def _topology(world: World) -> str:
    """Return a row for each node, a column for each rail: which ranks reduce together."""
    shards = range(world.num_shards)
    nodes = [(node.name, *(f"rank {world.owner(shard, node.index)}" for shard in shards)) for node in world.nodes]
    return format_table([("", *(f"rail {shard}" for shard in shards)), *nodes])


def _train(console: Console, strategy: mpistrat.Strategy, epochs: int, checkpoints: Path | None, meter: Meter) -> float:
    """Train with a progress bar, or without a terminal a line per epoch; return the accuracy on the test data."""
    from rich.progress import BarColumn, Progress, TextColumn

    console.print("rank 0 imports scikit-learn, and loads its images")
    columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        total = epochs * train_digits.TRAINING_IMAGES
        bar = progress.add_task("", total=total, epoch=1)

        def on_start(epoch: int) -> None:
            if epoch:
                console.print(f"goes on after epoch {epoch}, from {checkpoints}")
                progress.update(bar, advance=epoch * train_digits.TRAINING_IMAGES)
            meter.start()

        def on_step(epoch: int, loss: float, images: int) -> None:
            meter.end_step(epoch, loss, images)
            progress.update(bar, advance=images, epoch=epoch + 1, description=_summary(meter.steps[-RECENT:]))
            ended = sum(step.images for step in meter.steps) % train_digits.TRAINING_IMAGES == 0
            if ended and not console.is_terminal:
                console.print(f"epoch {epoch + 1}/{epochs}  {_summary([step for step in meter.steps if step.epoch == epoch])}")

        return train_digits.train(
            strategy, epochs, rate=RATE, hidden=HIDDEN, checkpoints=checkpoints, on_start=on_start, on_step=on_step
        )[1]


def _summary(steps: Sequence[Step]) -> str:
    loss, rate, share = means(steps)
    return f"loss {loss:.3f}  {rate:6.0f} images/s  {share:4.0%} communicating"


def _conclude(console: Console, accuracy: float, steps: Sequence[Step], out: Path) -> None:
    console.print(f"\n[bold]test accuracy {accuracy:.3f}[/] after {format_count(steps[-1].epoch + 1, 'epoch')}")
    _, rate, share = means(steps)
    console.print(f"{rate:.0f} images/s; {share:.0%} of the time communicating, copies and waiting for other ranks included\n")
    files = [
        (str(out / "training.png"), "loss and throughput of each step"),
        (str(out / "timeline.json"), "what each rank did when: open it at https://ui.perfetto.dev or chrome://tracing"),
        (train_digits.__file__, "the training script; start it with python, mpiexec, srun or mpistrat run"),
    ]
    console.print(format_table(files))


def _sizes(world: World) -> str:
    return f"{format_count(world.size, 'rank')} on {format_count(world.num_nodes, 'node')} ({world.shape})"


def _plot(path: Path, title: str, steps: Sequence[Step]) -> None:
    """Draw the loss and the throughput of each step into a PNG file."""
    import matplotlib  # slow, and no other rank needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    epochs = [list(group) for _, group in groupby(steps, key=lambda step: step.epoch)]
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 5.5), layout="constrained")
    figure.suptitle(title)
    losses, rates, _ = zip(*map(means, epochs), strict=True)
    _draw(upper, epochs, [step.loss for step in steps], losses, "#2a6fb0")
    upper.set_yscale("log")
    upper.set_ylabel("training loss")
    rate_of_steps = [step.images / step.seconds for step in steps]
    _draw(lower, epochs, rate_of_steps, rates, "#c2571a")
    lower.set_ylim(0, 1.1 * max(rate_of_steps))
    lower.set_ylabel("images per second")
    lower.set_xlabel(f"epoch ({means(steps)[2]:.0%} of the time communicating, copies and waiting included)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw(axes: Any, epochs: Sequence[Sequence[Step]], values: Sequence[float], means: Sequence[float], color: str) -> None:
    """Draw a value of each step where the step ends, in epochs, and the means of the epochs."""
    first, last = epochs[0][0].epoch, epochs[-1][0].epoch + 1
    places = [step.epoch + (index + 1) / len(epoch) for epoch in epochs for index, step in enumerate(epoch)]
    axes.plot(places, values, color=color, alpha=0.35, label="each step")
    axes.stairs(means, range(first, last + 1), baseline=None, color=color, linewidth=2, label="mean of the epoch")
    axes.set_xlim(first, last)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)


if __name__ == "__main__":
    main()
