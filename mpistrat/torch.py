"""Data parallelism for modules of PyTorch: the same state to begin with, and gradients that are averaged during backward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array, as_array, as_operand, as_target, is_aligned, like
from mpistrat.communicator.communicator import average_leaves, communicator_of
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.errors import InvalidArgumentError, UnavailableError, UnsupportedDtypeError
from mpistrat.execution.engine import Work
from mpistrat.structures import flatten, leaf_names, map_leaves

if TYPE_CHECKING:
    import torch

__all__ = ["average", "average_gradients", "broadcast_state"]

HOST_BUCKET_BYTES, GPU_BUCKET_BYTES = 8 << 20, 25 << 20
"""Gradients that are reduced together, at most; a larger one is a bucket of its own. DistributedDataParallel has 25 MiB."""

_LAYOUTS_KEPT = 1024


def average_gradients(
    model: torch.nn.Module,
    communicator: BaseCommunicator | None = None,
    options: CommunicationOptions | None = None,
    gradient_as_bucket_view: bool = False,
) -> _AveragedGradients:
    """Return a context that leaves the gradients of `model` averaged over all ranks. Leaving it is a collective call.

    Put ``loss.backward()`` into it: gradients are reduced, in buckets, while those of earlier layers are still computed. When
    the block ends, ``parameter.grad`` is the average, in place. Gradients that were there before take part. Several
    backward passes in a block add up, as they do outside; but it is cheaper to have only the last one in it, because gradients
    to which a later pass adds are averaged again when the block ends. An empty block averages what there is, without overlap.

    A gradient that is None on all ranks stays None. After an error in the block, so are those that were being averaged.

    Parameters
    ----------
    model : torch.nn.Module
        With the same parameters on all ranks; those that require no gradient are left out.
    communicator : Communicator, optional
        Whose ranks average; by default all ranks of the job.
    options : CommunicationOptions, optional
        Of each all-reduce: ``intra_dtype="native"`` leaves bfloat16 as it is inside a node. Buckets have up to `bytes_per_pack`
        bytes; 0 means 8 MiB in host memory and 25 MiB on GPUs.
    gradient_as_bucket_view : bool
        As of DistributedDataParallel: gradients of a bucket become views of one buffer, which is averaged in place. They are
        copied there where they are not such views yet: in the first step, and after ``zero_grad()``, which drops them; with
        ``zero_grad(set_to_none=False)`` nothing is copied. ``detach_()`` refuses such views. A bucket in which a parameter has
        no gradient is averaged as it is otherwise.

    Raises
    ------
    AgreementError
        On every rank, if gradients have other shapes, dtypes or memory formats, or are None on some ranks only; it names these.
    UnsupportedDtypeError
        If a gradient is sparse.
    TypeError
        If `model` is not a module, or `communicator` not a communicator.
    InvalidArgumentError
        If `options` are not CommunicationOptions, or what is to be a view has a graph, by ``backward(create_graph=True)``.
    """
    communicator = communicator_of("average_gradients", communicator)
    _check_module("average_gradients", model, communicator)
    with communicator.refusing("average_gradients"):
        check_options(options)
    return _AveragedGradients(model, communicator, options, gradient_as_bucket_view)


def average(value: Any, communicator: BaseCommunicator | None = None) -> Any:
    """Return the mean over all ranks of a loss or metric, or of each one in a nest. A collective call.

    No gradient flows through it. Closures of optimizers return the mean loss: by losses of their own, ranks would take
    different steps of a line search.

    Parameters
    ----------
    value : nest of torch.Tensor or float
        Of the same structure, shapes and dtypes on all ranks.
    communicator : Communicator, optional
        Whose ranks average; by default all ranks of the job.

    Raises
    ------
    TypeError
        If `communicator` is not a Communicator.
    AgreementError
        On every rank, if structures, shapes or dtypes differ.
    UnsupportedDtypeError
        If a leaf is not an array of floats.
    """
    communicator = communicator_of("average", communicator)
    with communicator.refusing("average"):
        leaves, structure = flatten(value)
    return structure.unflatten(average_leaves(leaves, lambda: leaf_names(value), structure, communicator))


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
        On every rank, if models have other names, shapes, dtypes or memory formats, or some ranks have no optimizer. Or a
        tensor of the model has gaps, is not aligned, or is a lazy ``conj()``.
    TypeError
        If `model` is not a module, `optimizer` not an optimizer, or `communicator` not a communicator.
    """
    communicator = communicator_of("broadcast_state", communicator)
    _check_module("broadcast_state", model, communicator)
    if not (optimizer is None or hasattr(optimizer, "load_state_dict")):
        error = TypeError(
            f"broadcast_state takes a torch.optim.Optimizer, or None; got {type(optimizer).__name__}.\n"
            "    incorrect:  broadcast_state(model, communicator)\n"
            "    correct:    broadcast_state(model, communicator=communicator)"
        )
        communicator.refuse("broadcast_state", error)
    named = [(name, tensor.detach()) for name, tensor in [*model.named_parameters(), *model.named_buffers()]]
    with communicator.refusing("broadcast_state"):
        for name, tensor in named:
            if not is_aligned(as_target(tensor, name)):  # which refuses a lazy conj(): both are read from a copy
                raise InvalidArgumentError(f"{name} is not aligned in memory: replace it by {name}.clone()")
        arrays, orders = _in_memory_order(named)
    what = [*(name for name, _ in named), *([] if optimizer is None else ["its optimizer"])]
    communicator.note(f"broadcast_state of {', '.join(what)}{orders}")
    communicator.broadcast(arrays, root, out=arrays)
    _hand_back(arrays, [tensor for _, tensor in named])
    if optimizer is None:
        return
    mine = map_leaves(_from_tensor, optimizer.state_dict()) if communicator.rank == root else None
    state = communicator.broadcast_object(mine, root)
    if communicator.rank != root:
        optimizer.load_state_dict(map_leaves(_to_tensor, state))


@dataclass
class _Bucket:
    """Parameters of one dtype and device whose gradients are reduced together."""

    named: list[tuple[str, torch.nn.Parameter]] = field(default_factory=list)
    nbytes: int = 0
    ready: set[str] = field(default_factory=set)
    work: Work[list[Array]] | None = None
    averaged: list[torch.Tensor] = field(default_factory=list)  # the gradients, or the buffer of which they are views


class _AveragedGradients:
    """What `average_gradients` returns."""

    def __init__(
        self, model: torch.nn.Module, communicator: BaseCommunicator, options: CommunicationOptions | None, are_views: bool
    ) -> None:
        self._model, self._communicator, self._options, self._are_views = model, communicator, options, are_views
        self._buckets: list[_Bucket] = []
        self._num_started = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._was_entered = False

    def __enter__(self) -> None:
        self._was_entered = True
        bucket_bytes = 0 if self._options is None else self._options.bytes_per_pack
        self._buckets, self._num_started = _buckets_of(self._model, bucket_bytes), 0
        # what is ready last has nothing to overlap with
        for bucket in self._buckets[:-1]:
            for name, parameter in bucket.named:
                self._hooks.append(parameter.register_hook(partial(self._wait_before_adding, bucket)))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket, name)))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if kind is not None:
            for _, parameter in [named for bucket in self._buckets if bucket.work is not None for named in bucket.named]:
                parameter.grad = None  # an average may still be written to it, even after it has been set to zero
            return
        self._wait()
        for bucket in self._buckets:
            if bucket.work is not None:
                continue
            arrays = self._gradients(bucket)
            if arrays:
                self._communicator.all_reduce("mean", arrays, self._options, out=arrays)
            _hand_back(arrays, bucket.averaged)

    def __del__(self) -> None:
        if not self._was_entered:
            warnings.warn(
                "average_gradients(model) averages nothing by itself.\n"
                "    incorrect:  loss.backward(); mpistrat.torch.average_gradients(model)\n"
                "    correct:    with mpistrat.torch.average_gradients(model): loss.backward()",
                RuntimeWarning,
                stacklevel=2,
            )

    def _wait_before_adding(self, bucket: _Bucket, _: torch.Tensor) -> None:
        """Wait for a bucket that a later backward pass adds to; equal averages stay as they are when it is averaged again."""
        _wait_for(bucket)
        bucket.work = None

    def _ready(self, bucket: _Bucket, name: str, _: torch.Tensor) -> None:
        """Note a gradient that is there, and start the buckets that are complete, in the same order on all ranks."""
        bucket.ready.add(name)
        for following in self._buckets[self._num_started : -1]:
            if len(following.ready) < len(following.named):
                return
            arrays = self._gradients(following)
            try:
                following.work = self._communicator.start_all_reduce("mean", arrays, self._options, out=arrays)
            except UnavailableError:
                self._wait()  # an earlier bucket has failed already: its error says why
                raise
            self._num_started += 1

    def _wait(self) -> None:
        """Wait for the buckets that have been started."""
        for bucket in self._buckets:
            _wait_for(bucket)

    def _gradients(self, bucket: _Bucket) -> list[Array]:
        """Return the gradients of a bucket that are there, or what they are views of; ranks compare which are not."""
        missing = [name for name, parameter in bucket.named if parameter.grad is None]
        if missing:
            self._communicator.note(f"average_gradients without a gradient of {', '.join(missing)}")
        elif self._are_views:
            self._communicator.note(f"average_gradients of views: {_places_of(bucket)[2]}")
        with self._communicator.refusing("average_gradients"):
            named = [(name, _resolved(parameter)) for name, parameter in bucket.named if parameter.grad is not None]
            for name, gradient in named:
                _check_gradient(name, gradient, self._are_views)
            if self._are_views and not missing and len({gradient.dtype for _, gradient in named}) == 1:
                named = [("a bucket", _as_views(bucket))]
            bucket.averaged = [gradient for _, gradient in named]
            arrays, orders = _in_memory_order(named)
        if orders:
            self._communicator.note(f"average_gradients{orders}")
        return arrays


def _check_module(call: str, model: object, communicator: BaseCommunicator) -> None:
    import torch

    if not isinstance(model, torch.nn.Module):
        error = TypeError(
            f"{call} takes a torch.nn.Module, whose parameters have names; got {type(model).__name__}.\n"
            f"    incorrect:  {call}(model.parameters()); {call}(model.state_dict())\n"
            f"    correct:    {call}(model); {call}(torch.nn.ModuleList([first, second]))"
        )
        communicator.refuse(call, error)


def _buckets_of(model: torch.nn.Module, bucket_bytes: int) -> list[_Bucket]:
    """Return the parameters in buckets, in about the order in which backward gets to them."""
    full: list[_Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    for name, parameter in reversed([each for each in model.named_parameters() if each[1].requires_grad]):
        nbytes, kind = parameter.numel() * parameter.element_size(), (parameter.dtype, parameter.device)
        bucket = filling.setdefault(kind, _Bucket())
        most = bucket_bytes or (GPU_BUCKET_BYTES if parameter.is_cuda else HOST_BUCKET_BYTES)
        if bucket.named and bucket.nbytes + nbytes > most:
            full.append(bucket)
            bucket = filling[kind] = _Bucket()
        bucket.named.append((name, parameter))
        bucket.nbytes += nbytes
    return [*full, *filling.values()]


def _wait_for(bucket: _Bucket) -> None:
    """Wait for a bucket, if it has been started; on a GPU by the streams of PyTorch."""
    if bucket.work is not None:
        _hand_back(bucket.work.wait(), bucket.averaged)


def _resolved(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a gradient that lies in memory as it is: PyTorch may leave conjugation and signs to whoever reads it."""
    gradient = parameter.grad
    assert gradient is not None, "the caller has looked"
    resolved = gradient.resolve_conj().resolve_neg()
    if resolved is not gradient:
        parameter.grad = resolved
    return resolved


def _check_gradient(name: str, gradient: torch.Tensor, is_view: bool) -> None:
    import torch

    if gradient.layout is not torch.strided:
        raise UnsupportedDtypeError(
            f"the gradient of {name} is sparse, which is not averaged: make its layer with sparse=False, or pass "
            "IndexedSlices to the all_reduce of a replica context"
        )
    if is_view and gradient.requires_grad:
        raise InvalidArgumentError(
            f"the gradient of {name} has a graph, by backward(create_graph=True), which no view of a bucket has: "
            "gradient_as_bucket_view=False leaves gradients where they are"
        )


def _places_of(bucket: _Bucket) -> tuple[list[tuple[torch.Size, tuple[int, ...], int]], int, str]:
    """Return shape, strides and first element of each gradient in one buffer; the elements of that, and a text of both."""
    return _places(tuple([(parameter.shape, parameter.stride()) for _, parameter in bucket.named]))


@lru_cache(_LAYOUTS_KEPT)
def _places(
    parameters: tuple[tuple[torch.Size, tuple[int, ...]], ...],
) -> tuple[list[tuple[torch.Size, tuple[int, ...], int]], int, str]:
    import torch

    views, first = [], 0
    for shape, given in parameters:
        strides = torch.empty_like(torch.empty_strided(shape, given, device="meta")).stride()  # as PyTorch makes gradients
        views.append((shape, strides, first))
        first += shape.numel()
    return views, first, ", ".join([f"{tuple(shape)} {strides}" for shape, strides, _ in views])


def _as_views(bucket: _Bucket) -> torch.Tensor:
    """Return the buffer that the gradients of a bucket, which are all there, are views of, or become."""
    import torch

    gradients, (places, elements, _) = [parameter.grad for _, parameter in bucket.named], _places_of(bucket)
    one = next((gradient for gradient in gradients if gradient.numel()), gradients[0])  # those of no elements have no address
    memory, itemsize = one.untyped_storage(), one.element_size()
    start, is_whole = memory.data_ptr(), memory.nbytes() == elements * itemsize
    if is_whole and all(
        not gradient.numel() or (gradient.data_ptr() == start + first * itemsize and gradient.stride() == strides)
        for gradient, (_, strides, first) in zip(gradients, places, strict=True)
    ):
        return one.as_strided((elements,), (1,), 0)
    buffer = gradients[0].new_empty(elements)
    views = [buffer.as_strided(*place) for place in places]
    torch._foreach_copy_(views, gradients)
    for (_, parameter), view in zip(bucket.named, views, strict=True):
        parameter.grad = view
    return buffer


def _in_memory_order(named: list[tuple[str, torch.Tensor]]) -> tuple[list[Array], str]:
    """Return tensors as C-contiguous arrays that share their memory, and a text that tells which axes are in another order."""
    arrays, orders = [], ""
    for name, tensor in named:
        array = as_operand(tensor, name)
        if not array.flags.c_contiguous:
            axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
            array, orders = array.transpose(axes), f"{orders}; {name} has axes {axes} in memory"
        if not array.flags.c_contiguous:
            raise InvalidArgumentError(f"{name} has gaps in memory or overlaps itself: replace it by {name}.contiguous()")
        arrays.append(array)
    return arrays, orders


def _hand_back(arrays: list[Array], tensors: list[torch.Tensor]) -> None:
    """Let PyTorch's current stream wait for what was written to the memory of tensors: a call on a GPU returns before."""
    for array, tensor in zip(arrays, tensors, strict=True):
        like(array, tensor)


def _from_tensor(leaf: Any) -> Any:
    import torch

    return as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _to_tensor(leaf: Any) -> Any:
    import torch

    return like(leaf, torch.empty(0)) if hasattr(leaf, "dtype") and not isinstance(leaf, np.generic) else leaf
