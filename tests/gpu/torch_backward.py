"""Training by PyTorch on a GPU: gradients that are averaged during backward, beside one process that has the whole batch.

PyTorch runs the hooks of gradients on a thread of its own there, and the loss is averaged inside the block while buckets are
under way. Some steps are on a side stream; in some the stream of one rank is delayed before backward. Gradients are dropped
after each step, and PyTorch gives their memory to tensors that are filled with NaN. That nothing went wrong shows
little, unless it goes wrong where streams do not wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mpistrat
import mpistrat.torch
from mpistrat.communicator.interface import BaseCommunicator
from tests.gpu.interop import DELAY_CYCLES, Torch
from tests.gpu.program import the_gpu, with_strategy, write_report
from tests.gpu.streams import without

if TYPE_CHECKING:
    import torch

STEPS = 50
WIDTH = 1600
OPTIONS = mpistrat.experimental.CommunicationOptions(bytes_per_pack=1 << 20)  # a matrix of weights is larger than a bucket
ROWS = 32  # of each rank
LEAST_BUCKETS = 3
TOLERANCE = 1e-4  # of the largest element of a gradient: rounding makes 1e-6, and what is wrong is of the order of 1
RATE = 0.01
SIDE_EVERY, DELAY_EVERY = 3, 5

Backward = Callable[["torch.Tensor"], None]


def main(removed: str = "") -> dict[str, Any]:
    """Train on the GPU; with a kind of wait removed, as by `streams`, return how many steps went wrong. A collective call."""

    def found(strategy: mpistrat.Strategy) -> dict[str, Any]:
        if missing := Torch().missing():
            return {"skipped": missing}
        with without(removed, the_gpu().stream()):
            figures, wrong = train(strategy.extended.communicator, "cuda", lambda loss: loss.backward())
        return {f"wrong_without_{removed}": len(wrong)} if removed else right(figures, wrong)

    return with_strategy(found)


def right(figures: dict[str, float], wrong: Sequence[str]) -> dict[str, float]:
    """Return figures; raise if steps are wrong."""
    if wrong:
        raise AssertionError(f"losses or gradients differ from those of the whole batch in {len(wrong)} steps: {wrong[0]}")
    return figures


def train(
    communicator: BaseCommunicator, device: str, backward: Backward, width: int = WIDTH, steps: int = STEPS
) -> tuple[dict[str, float], list[str]]:
    """Train a model with averaged gradients, and compare these and the losses with those of the whole batch. A collective call.

    Returns the steps that differ, after ``steps``; ``buckets`` of gradients; ``largest_difference`` from a gradient or loss, as
    a part of its largest element; ``hooks_elsewhere``: the hooks that another thread ran; and ``reused``: the tensors that lay
    where a gradient had been.
    """
    import torch

    batches = _batches(communicator.size, width, steps, device)
    expected = _alone(_model(width, device), batches)
    model, main_thread = _model(width, device), threading.get_ident()
    buckets = len(mpistrat.torch._buckets_of(model, OPTIONS.bytes_per_pack))
    assert buckets >= LEAST_BUCKETS, f"{buckets} buckets; hooks start those before the last one"
    elsewhere, reused = [], 0
    hook = lambda _: elsewhere.append(threading.get_ident() != main_thread)  # noqa: E731
    next(model.parameters()).register_post_accumulate_grad_hook(hook)
    differences = []
    for step, (batch, (loss, gradients)) in enumerate(zip(batches, expected, strict=True)):
        with _stream(device, is_side=step % SIDE_EVERY == 0):
            if device == "cuda" and step % DELAY_EVERY == 0 and communicator.rank == communicator.size - 1:
                torch.cuda._sleep(DELAY_CYCLES)
            with mpistrat.torch.average_gradients(model, communicator, OPTIONS, gradient_as_bucket_view=step % 2 == 1):
                mine = _loss(model, batch[communicator.rank])
                backward(mine)
                mean = mpistrat.torch.average(mine.detach(), communicator)
            found = [mean, *(parameter.grad for parameter in model.parameters())]
            pairs = zip(found, [loss, *gradients], strict=True)
            differences += [(each - expected).abs().max() / expected.abs().max() for each, expected in pairs]
            _descend(model)
            left = {each.data_ptr() for each in found[1:]}
            del found, mean, mine, pairs
            model.zero_grad(set_to_none=True)
            rubbish = [torch.full_like(parameter, torch.nan) for parameter in model.parameters()]
            reused += sum(each.data_ptr() in left for each in rubbish)
            del rubbish
    largest = torch.stack(differences).nan_to_num(torch.inf).reshape(steps, -1).amax(1).tolist()
    figures = {
        "steps": steps,
        "buckets": buckets,
        "largest_difference": max(largest),
        "hooks_elsewhere": sum(elsewhere),
        "reused": reused,
    }
    return figures, [f"step {step} by {each:.3g}" for step, each in enumerate(largest) if each > TOLERANCE]


def _alone(model: torch.nn.Module, batches: torch.Tensor) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return the losses and gradients of the whole batch, step by step."""
    expected = []
    for batch in batches:
        loss = _loss(model, batch.flatten(0, 1))
        loss.backward()
        expected.append((loss.detach(), [parameter.grad for parameter in model.parameters()]))
        _descend(model)
        model.zero_grad(set_to_none=True)
    return expected


def _batches(size: int, width: int, steps: int, device: str) -> torch.Tensor:
    """Return inputs of each step, rank and row."""
    import torch

    return torch.randn(steps, size, ROWS, width, generator=torch.Generator().manual_seed(0)).to(device)


def _model(width: int, device: str) -> torch.nn.Module:
    import torch

    torch.manual_seed(0)
    hidden = [layer for _ in range(LEAST_BUCKETS) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(width, 1)).to(device)


def _loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) - rows[:, :1]).square().mean()


def _descend(model: torch.nn.Module) -> None:
    """Take the step of an optimizer; to import PyTorch's own takes many seconds."""
    for parameter in model.parameters():
        parameter.data.sub_(parameter.grad, alpha=RATE)


@contextmanager
def _stream(device: str, is_side: bool) -> Iterator[None]:
    """Give a context in which PyTorch computes on a side stream, after what came before, and before what comes afterwards."""
    import torch

    if device == "cpu" or not is_side:
        yield
        return
    outside, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(outside)
    with torch.cuda.stream(side):
        yield
    outside.wait_stream(side)


if __name__ == "__main__":
    write_report(main)
