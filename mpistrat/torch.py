"""Data parallelism for modules of PyTorch: the same state to begin with, and gradients that are averaged during backward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpistrat.arrays import Array, as_array, as_operand, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.of_job import job_communicator
from mpistrat.communicator.small_batch import SMALL_BATCH_BYTES
from mpistrat.errors import InvalidArgumentError, MpistratError, UnavailableError, UnsupportedDtypeError
from mpistrat.execution.work import Work
from mpistrat.structures import map_leaves

if TYPE_CHECKING:
    import torch

__all__ = ["average_gradients", "broadcast_state"]

BUCKET_BYTES = 8 << 20
"""Gradients that are reduced together, at most; a larger one is a bucket of its own."""


def average_gradients(model: torch.nn.Module, communicator: BaseCommunicator | None = None) -> _AveragedGradients:
    """Return a context that leaves the gradients of `model` averaged over all ranks. Leaving it is a collective call.

    Put ``loss.backward()`` into it: gradients are reduced, in buckets, while those of earlier layers are still computed. When
    the block ends, ``parameter.grad`` is the average, in place. Gradients that were there before take part, so that of
    several backward passes only the last belongs into the block. An empty block averages what there is, without overlap.

    A gradient that is None on all ranks stays None.

    Parameters
    ----------
    model : torch.nn.Module
        With the same parameters on all ranks; those that require no gradient are left out.
    communicator : Communicator, optional
        Whose ranks average; by default all ranks of the job.

    Raises
    ------
    AgreementError
        On every rank, if gradients have other shapes or dtypes, or are None on some ranks only; it names these.
    UnsupportedDtypeError
        If a gradient is sparse.
    RuntimeError
        If there are two backward passes in the block.
    """
    return _AveragedGradients(model, job_communicator() if communicator is None else communicator)


def broadcast_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    communicator: BaseCommunicator | None = None,
    root: int = 0,
) -> None:
    """Give all ranks the parameters and buffers of rank `root`, and the state of its optimizer. A collective call.

    Tensors of the model are written in place. The optimizer's state is sent as an object, which is slow, and loaded by
    ``load_state_dict``: the other ranks need not have one yet.

    Parameters
    ----------
    model : torch.nn.Module
        With the same parameters and buffers on all ranks.
    optimizer : torch.optim.Optimizer, optional
        Of the model, on all ranks or on none.
    communicator : Communicator, optional
        Whose ranks take part; by default all ranks of the job.
    root : int
        The rank whose state it is.

    Raises
    ------
    AgreementError, InvalidArgumentError
        If models have other names, shapes or dtypes: on every rank.
    """
    communicator = job_communicator() if communicator is None else communicator
    named = [*model.named_parameters(), *model.named_buffers()]
    communicator.note(f"broadcast_state of {', '.join(name for name, _ in named)}")
    tensors = [tensor.detach() for _, tensor in named]
    arrays = [_in_memory_order(tensor, name) for tensor, (name, _) in zip(tensors, named, strict=True)]
    communicator.broadcast(arrays, root, out=arrays)
    _hand_back(arrays, tensors)
    if optimizer is None:
        return
    mine = map_leaves(_from_tensor, optimizer.state_dict()) if communicator.rank == root else None
    state = communicator.broadcast_object(mine, root)
    if communicator.rank != root:
        optimizer.load_state_dict(map_leaves(_to_tensor, state))


@dataclass
class _Bucket:
    """Parameters whose gradients are reduced together."""

    named: list[tuple[str, torch.nn.Parameter]] = field(default_factory=list)
    nbytes: int = 0
    num_ready: int = 0
    work: Work[list[Array]] | None = None


class _AveragedGradients:
    """What `average_gradients` returns."""

    def __init__(self, model: torch.nn.Module, communicator: BaseCommunicator) -> None:
        self._communicator = communicator
        self._buckets = _buckets_of(model)
        self._num_started = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._was_entered = False

    def __enter__(self) -> None:
        self._was_entered = True
        # what is ready last has nothing to overlap with
        for bucket in self._buckets[:-1]:
            for _, parameter in bucket.named:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._ready(bucket)))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is not None:
            return
        self._wait()
        for bucket in self._buckets[self._num_started :]:
            arrays = self._gradients(bucket)
            if sum(array.nbytes for array in arrays) <= SMALL_BATCH_BYTES:
                # their fast path returns new arrays
                for array, mean in zip(arrays, self._communicator.all_reduce("mean", arrays) if arrays else [], strict=True):
                    array[...] = mean
            else:
                self._communicator.all_reduce("mean", arrays, out=arrays)
            _hand_back(arrays, [parameter.grad for _, parameter in bucket.named if parameter.grad is not None])

    def __del__(self) -> None:
        if not self._was_entered:
            warnings.warn(
                "average_gradients(model) averages nothing by itself.\n"
                "    incorrect:  loss.backward(); mpistrat.torch.average_gradients(model)\n"
                "    correct:    with mpistrat.torch.average_gradients(model): loss.backward()",
                RuntimeWarning,
                stacklevel=2,
            )

    def _ready(self, bucket: _Bucket) -> None:
        """Count a gradient that is there, and start the buckets that are complete, in the same order on all ranks."""
        if bucket.work is not None:
            raise RuntimeError(
                "a second backward pass in one block of average_gradients: its gradients are being averaged already.\n"
                "    incorrect:  with average_gradients(model): first.backward(); second.backward()\n"
                "    correct:    first.backward(), and then: with average_gradients(model): second.backward()"
            )
        bucket.num_ready += 1
        for following in self._buckets[self._num_started : -1]:
            if following.num_ready < len(following.named):
                return
            arrays = self._gradients(following)
            try:
                following.work = self._communicator.start_all_reduce("mean", arrays, out=arrays)
            except UnavailableError:
                self._wait()  # an earlier bucket has failed already: its error says why
                raise
            self._num_started += 1

    def _wait(self) -> None:
        """Wait for the buckets that have been started."""
        for bucket in self._buckets[: self._num_started]:
            assert bucket.work is not None, "buckets are started in order"
            bucket.work.wait()

    def _gradients(self, bucket: _Bucket) -> list[Array]:
        """Return the gradients of a bucket that are there; ranks compare which are not."""
        missing = [name for name, parameter in bucket.named if parameter.grad is None]
        if missing:
            self._communicator.note(f"average_gradients without a gradient of {', '.join(missing)}")
        try:
            return [_gradient(name, parameter) for name, parameter in bucket.named if parameter.grad is not None]
        except MpistratError as error:
            self._communicator.refuse("average_gradients", error)


def _buckets_of(model: torch.nn.Module) -> list[_Bucket]:
    """Return the parameters in buckets, in about the order in which backward gets to them."""
    buckets = [_Bucket()]
    for name, parameter in reversed([each for each in model.named_parameters() if each[1].requires_grad]):
        nbytes = parameter.numel() * parameter.element_size()
        if buckets[-1].named and buckets[-1].nbytes + nbytes > BUCKET_BYTES:
            buckets.append(_Bucket())
        buckets[-1].named.append((name, parameter))
        buckets[-1].nbytes += nbytes
    return buckets


def _gradient(name: str, parameter: torch.nn.Parameter) -> Array:
    """Return the gradient of a parameter as an array that shares its memory."""
    import torch

    gradient = parameter.grad
    assert gradient is not None, "the caller has looked"
    if gradient.layout is not torch.strided:
        raise UnsupportedDtypeError(
            f"the gradient of {name} is sparse, which is not averaged: make its layer with sparse=False, or pass "
            "IndexedSlices to the all_reduce of a replica context"
        )
    return _in_memory_order(gradient, name)


def _in_memory_order(tensor: torch.Tensor, name: str) -> Array:
    """Return a tensor as a C-contiguous array that shares its memory: axes in the order of their strides."""
    array = as_operand(tensor, name)
    if not array.flags.c_contiguous:
        array = array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
    if not array.flags.c_contiguous:
        raise InvalidArgumentError(f"{name} has gaps in memory or overlaps itself: replace it by {name}.contiguous()")
    return array


def _hand_back(arrays: list[Array], tensors: list[torch.Tensor]) -> None:
    """Let PyTorch's current stream wait for what was written to the memory of tensors: a call on a GPU returns before."""
    for array, tensor in zip(arrays, tensors, strict=True):
        like(array, tensor)


def _from_tensor(leaf: Any) -> Any:
    import torch

    return as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _to_tensor(leaf: Any) -> Any:
    import torch

    return like(leaf, torch.empty(0)) if hasattr(leaf, "dtype") else leaf
