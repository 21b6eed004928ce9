"""`mpistrat.torch` and `mpistrat.jax`: gradients averaged during backward, averages of trees, the same state on all ranks."""

import threading
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpistrat
import mpistrat.jax
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import AgreementError, CollectiveError, InvalidArgumentError, UnsupportedDtypeError
from mpistrat.execution.engine import Job, submit
from mpistrat.mpi4py.intracomm import Buffer
from tests.launches import on_ranks
from tests.other_arrays import installed

pytestmark = on_ranks(2)  # the library is heavy to start, and other numbers of ranks would tell nothing new

SMALL_BUCKETS = CommunicationOptions(bytes_per_pack=1)  # one for each gradient
as_views = pytest.mark.parametrize("are_views", [False, True], ids=["apart", "views"])


@pytest.fixture
def torch():
    return installed("torch")


@pytest.fixture
def ours(torch):
    import mpistrat.torch

    return mpistrat.torch


@pytest.fixture
def communicator(comm):
    with mpistrat.Communicator(comm) as made:
        yield made


def _model(torch, seed=0, width=32):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)]
    return torch.nn.Sequential(*layers)


def _rows(torch, rank):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))


def _check(torch, found, size, num_passes=1):
    """Compare gradients with those of the mean of the losses of all ranks, computed on this one."""
    model = _model(torch)
    for _ in range(num_passes):
        (sum(model(_rows(torch, rank)).square().mean() for rank in range(size)) / size).backward()
    for parameter, expected in zip(found.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@as_views
@pytest.mark.parametrize("bucket_bytes", [1 << 30, 4096, 1], ids=["one bucket", "two or three", "one for each"])
def test_gradients_are_those_of_the_mean_loss_and_several_passes_add_up(torch, ours, communicator, bucket_bytes, are_views):
    model = _model(torch)
    averaged = ours.average_gradients(model, communicator, CommunicationOptions(bytes_per_pack=bucket_bytes), are_views)
    for num_passes in (1, 3, 2):  # a block may be entered again
        model.zero_grad(set_to_none=num_passes == 3)
        with averaged:
            if num_passes > 1:  # the last layer has no gradient yet
                model[:3](_rows(torch, 0)).sum().mul(0.0).backward()
            for _ in range(num_passes):
                model(_rows(torch, communicator.rank)).square().mean().backward()
        _check(torch, model, communicator.size, num_passes)


@as_views
def test_gradients_may_be_dropped_between_two_passes_and_one_that_no_rank_has_stays_none(torch, ours, communicator, are_views):
    model = _model(torch)
    with ours.average_gradients(model, communicator, SMALL_BUCKETS, are_views):
        model(_rows(torch, 9)).sum().backward()
        model.zero_grad()
        model(_rows(torch, communicator.rank)).square().mean().backward()
    _check(torch, model, communicator.size)
    model = _model(torch)
    model.unused = torch.nn.Linear(2, 2)
    frozen = model[0].weight.requires_grad_(False)
    with ours.average_gradients(model, communicator, CommunicationOptions(bytes_per_pack=64), are_views):
        torch.nn.Sequential(*list(model)[:4])(_rows(torch, communicator.rank)).square().mean().backward()
    assert frozen.grad is None
    assert model.unused.weight.grad is None
    assert model[2].weight.grad is not None


def test_hooks_may_run_on_a_thread_of_their_own(torch, ours, communicator):
    """As PyTorch runs those of gradients on GPUs."""
    model, gate = _model(torch), threading.Event()
    for _ in range(2):
        model.zero_grad()
        gate.clear()
        submit(Job(gate.wait, str))  # what the hooks start has not ended when the loss is averaged
        with ours.average_gradients(model, communicator, SMALL_BUCKETS):
            loss = model(_rows(torch, communicator.rank)).square().mean()
            backward = threading.Thread(target=loss.backward)
            backward.start()
            backward.join()
            threading.Timer(0.1, gate.set).start()
            mean = communicator.all_reduce("mean", np.array(loss.item()))
        losses = [model(_rows(torch, rank)).square().mean().item() for rank in range(communicator.size)]
        np.testing.assert_allclose(mean, np.mean(losses), rtol=1e-5)
        _check(torch, model, communicator.size)


@as_views
def test_after_an_error_in_the_block_no_average_is_written_to_gradients(torch, ours, communicator, are_views):
    model = _model(torch)
    averaged = ours.average_gradients(model, communicator, SMALL_BUCKETS, gradient_as_bucket_view=are_views)
    with suppress(ArithmeticError), averaged:
        model(_rows(torch, communicator.rank)).square().mean().backward()
        raise ArithmeticError  # on all ranks
    *_, last = reversed(list(model.parameters()))  # which has not been started
    assert [parameter for parameter in model.parameters() if parameter.grad is not None] == [last]
    model.zero_grad(set_to_none=False)
    with ours.average_gradients(model, communicator, SMALL_BUCKETS, gradient_as_bucket_view=are_views):
        model(_rows(torch, communicator.rank)).square().mean().backward()
    _check(torch, model, communicator.size)


def test_buckets_start_while_backward_goes_on(torch, ours, communicator, monkeypatch):
    model, began = _model(torch), []
    start = communicator.start_all_reduce

    def started(*arguments, **named):
        began.append(model[0].weight.grad is None)
        return start(*arguments, **named)

    monkeypatch.setattr(communicator, "start_all_reduce", started)
    with ours.average_gradients(model, communicator, SMALL_BUCKETS):
        model(_rows(torch, communicator.rank)).square().mean().backward()
    assert began.count(True) >= 4, "before the first layer had a gradient"


def test_an_empty_block_averages_in_place_what_is_there(torch, ours, communicator):
    model = _model(torch)
    for _ in range(2):
        model(_rows(torch, communicator.rank)).square().mean().backward()
    before = [parameter.grad for parameter in model.parameters()]
    with ours.average_gradients(model, communicator, SMALL_BUCKETS):
        pass
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), before, strict=True))
    _check(torch, model, communicator.size, 2)


@as_views
def test_gradients_of_other_layouts_and_dtypes_and_those_not_conjugated_or_negated_yet(torch, ours, communicator, are_views):
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    half = torch.nn.Linear(2, 2).to(torch.bfloat16)
    whole = torch.nn.ModuleList([model, half])
    whole.empty = torch.nn.Parameter(torch.empty(0, 3))
    for parameter in whole.parameters():
        parameter.grad = torch.full_like(parameter, communicator.rank + 1)
    assert not model.weight.grad.is_contiguous()
    with ours.average_gradients(whole, communicator, None, are_views):
        pass
    for parameter in whole.parameters():
        assert set(parameter.grad.flatten().tolist()) <= {(communicator.size + 1) / 2}
    assert model.weight.grad.stride() == model.weight.stride()
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in half.parameters()}) == 2 - are_views
    model, rank = torch.nn.Module(), communicator.rank
    model.w = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.v = torch.nn.Parameter(torch.ones(2))
    model.w.grad = torch.full((2,), 1 + rank + 1j).conj()
    model.v.grad = torch.full((2,), 1 + rank + 1j).conj().imag
    assert (model.w.grad.is_conj(), model.v.grad.is_neg()) == (True, True)
    with ours.average_gradients(model, communicator, None, are_views):
        pass
    assert model.w.grad.tolist() == [(communicator.size + 1) / 2 - 1j] * 2
    assert model.v.grad.tolist() == [-1] * 2


@pytest.mark.parametrize("bucket_bytes", [1 << 30, 1])
def test_a_gradient_that_some_ranks_lack_is_named(torch, ours, comm, bucket_bytes):
    communicator = mpistrat.Communicator(comm)  # not closed: the rank that had started more cannot any more
    communicator.is_strict = False
    model = _model(torch)
    layers = list(model) if communicator.rank else [layer for layer in model if layer is not model[2]]
    averaged = ours.average_gradients(model, communicator, CommunicationOptions(bytes_per_pack=bucket_bytes))
    with pytest.raises(AgreementError, match=r"without a gradient of 2\.bias"), averaged:
        torch.nn.Sequential(*layers)(_rows(torch, 0)).square().mean().backward()
    for bucket in averaged._buckets:  # nobody is to be told of what was started behind, at the end of the session
        with suppress(CollectiveError):
            assert bucket.work is None or bucket.work.wait()


def test_gradients_stay_views_of_one_buffer_that_is_averaged_in_place(torch, ours, communicator, monkeypatch):
    model, reduced = _model(torch), []
    model.empty = torch.nn.Parameter(torch.empty(0, 3))
    model.empty.grad = torch.empty(0, 3)
    optimizer, combine = torch.optim.Adam(model.parameters(), foreach=True), communicator.all_reduce

    def noted(op, arrays, *rest, out):
        reduced.append([array.shape for array in arrays])
        assert out is arrays
        return combine(op, arrays, *rest, out=out)

    monkeypatch.setattr(communicator, "all_reduce", noted)
    places, elements = [], sum(parameter.numel() for parameter in model.parameters())
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        with ours.average_gradients(model, communicator, gradient_as_bucket_view=True):
            model[:](_rows(torch, communicator.rank)).square().mean().backward()
        optimizer.step()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    assert places == [places[0]] * 3
    assert reduced == [[(elements,)]] * 3
    gradient = model[0].bias.grad
    model[0].bias.grad = torch.ones_like(gradient)  # which is no view
    with ours.average_gradients(model, communicator, gradient_as_bucket_view=True):
        pass
    assert set(model[0].bias.grad.tolist()) == {1.0}
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1
    with pytest.raises(RuntimeError, match="detach"):  # as under DistributedDataParallel
        model[0].bias.grad.detach_()


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_a_gradient_with_a_graph_is_no_view(torch, ours, communicator):
    model = _model(torch)
    averaged = ours.average_gradients(model, communicator, gradient_as_bucket_view=True)
    with pytest.raises(InvalidArgumentError, match=r"the gradient of 3.bias has a graph"), averaged:
        model(_rows(torch, communicator.rank)).square().mean().backward(create_graph=True)


@pytest.mark.parametrize("what", ["shapes", "strides", "views"])
def test_ranks_whose_buffers_have_other_gradients_are_told(torch, ours, comm, what):
    communicator = mpistrat.Communicator(comm)
    is_other = bool(communicator.rank)
    model = torch.nn.Conv2d(2, 6 if is_other and what == "shapes" else 3, 2, bias=False)
    if is_other and what == "shapes":
        model.weight = torch.nn.Parameter(model.weight.reshape(3, 2, 2, 4).clone())
    if is_other and what == "strides":
        model.to(memory_format=torch.channels_last)
    model.weight.grad = torch.ones_like(model.weight)
    averaged = ours.average_gradients(model, communicator, None, not (is_other and what == "views"))
    with pytest.raises(AgreementError, match=r"average_gradients of views: \(3, 2, 2, 2\)"), averaged:
        pass


@pytest.mark.parametrize("what", ["gradients", "state"])
def test_ranks_whose_tensors_lie_in_memory_in_another_order_are_told(torch, ours, comm, what):
    communicator, model = mpistrat.Communicator(comm), torch.nn.Linear(3, 3)
    if communicator.rank:
        model.weight = torch.nn.Parameter(model.weight.detach().t().contiguous().t())
    model.weight.grad = torch.ones_like(model.weight)

    def average():
        with ours.average_gradients(model, communicator):
            pass

    call = average if what == "gradients" else partial(ours.broadcast_state, model, communicator=communicator)
    with pytest.raises(AgreementError, match=r"rank 1: .*weight has axes \[1, 0\] in memory"):
        call()


def test_sparse_gradients_and_a_call_without_a_block_are_refused_by_name(torch, ours, communicator):
    model = torch.nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    averaged = ours.average_gradients(model, communicator, SMALL_BUCKETS)
    with pytest.raises(UnsupportedDtypeError, match="the gradient of weight is sparse"), averaged:
        pass
    with pytest.warns(RuntimeWarning, match="averages nothing by itself"):
        ours.average_gradients(_model(torch), communicator)


def test_an_optimizer_with_a_line_search_needs_the_mean_loss(torch, ours, communicator):
    model = _model(torch)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=8, line_search_fn="strong_wolfe")
    rows = _rows(torch, communicator.rank) * (1 + 9 * communicator.rank)

    def closure():
        optimizer.zero_grad()
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        with ours.average_gradients(model, communicator, SMALL_BUCKETS):
            loss.backward()
        return ours.average(loss, communicator)

    first, last = optimizer.step(closure), closure()
    assert last < first
    assert not last.requires_grad


def test_averages_of_losses_and_metrics(torch, ours, communicator):
    rank, expected = communicator.rank, (communicator.size - 1) / 2
    found = ours.average({"loss": torch.tensor(float(rank)), "parts": [np.full(2, float(rank)), float(rank)]}, communicator)
    assert found["loss"].item() == expected
    assert found["parts"][0].tolist() == [expected] * 2
    assert found["parts"][1] == expected
    with pytest.raises(UnsupportedDtypeError, match=r"value\['right'\] has dtype int64, whose mean would be a whole number"):
        ours.average({"right": torch.tensor(rank)}, communicator)

    class Lost(dict):
        def __iter__(self):
            raise OSError("the disk is gone")

        keys = items = __iter__

    communicator.is_strict = True
    with pytest.raises(AgreementError if rank else OSError, match="the disk is gone"):
        ours.average({"a": 1.0} if rank else Lost(a=1.0), communicator)
    assert ours.average(float(rank), communicator) == expected, "and all are in step again"


def test_wrong_arguments_are_refused_by_name_when_the_block_begins(torch, ours, communicator):
    model = _model(torch)
    with pytest.raises(TypeError, match=r"average_gradients takes a torch.nn.Module(.|\n)*incorrect:  .*model.parameters\(\)"):
        ours.average_gradients(model.parameters(), communicator)
    with pytest.raises(TypeError, match=r"broadcast_state takes a torch.nn.Module"):
        ours.broadcast_state(model.state_dict(), communicator=communicator)
    with pytest.raises(TypeError, match=r"got Communicator.\n.*\n    correct: .*\(model, communicator=communicator"):
        ours.broadcast_state(model, communicator)
    with pytest.raises(TypeError, match=r"got CommunicationOptions.\n(.|\n)*correct: .*options=…"):
        ours.average_gradients(model, SMALL_BUCKETS)
    with pytest.raises(InvalidArgumentError, match="options must be CommunicationOptions or None; got 25"):
        ours.average_gradients(model, communicator, 25)


def test_all_ranks_begin_with_the_state_of_one(torch, ours, communicator):
    root = communicator.size - 1
    is_root = communicator.rank == root
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(communicator.rank + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=np.float64(0.1 if is_root else 0.5))  # a number of NumPy stays one
    if is_root:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    ours.broadcast_state(model, optimizer, communicator, root)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == 4
    assert model[1].num_batches_tracked.item() == root + 1 + 1
    state = optimizer.state_dict()["state"]
    mine = [*model.state_dict().values(), *(state[index][name] for index in state for name in ("exp_avg", "step"))]
    every = communicator.gather_objects([tensor.tolist() for tensor in mine])
    assert communicator.rank or every == [every[0]] * communicator.size
    assert all(tensor.dtype == torch.float32 for tensor in mine[:2])
    optimizer.step()


def test_a_tensor_that_is_read_from_a_copy_is_no_place_to_write_to(torch, ours, communicator):
    model = torch.nn.Module()
    model.register_buffer("packed", torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1))
    with pytest.raises(InvalidArgumentError, match=r"^packed is not aligned in memory: replace it by packed\.clone\(\)"):
        ours.broadcast_state(model, communicator=communicator)
    del model.packed
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64).conj())
    with pytest.raises(InvalidArgumentError, match=r"^phase must be an array to write to: .* no lazy conj\(\)"):
        ours.broadcast_state(model, communicator=communicator)
    with pytest.raises(InvalidArgumentError, match=r"^the buffer must be an array to write to: .* no lazy conj\(\)"):
        Buffer(model.phase)
    assert Buffer(model.phase.resolve_conj()).contents(None).nbytes == 16


def test_models_of_other_shapes_and_optimizers_of_one_rank_are_told(torch, ours, comm):
    model = torch.nn.Linear(3, 2 if comm.rank else 3)
    with pytest.raises((AgreementError, ValueError)):
        ours.broadcast_state(model, communicator=mpistrat.Communicator(comm))
    model = torch.nn.Linear(3, 3)
    before = model.weight.tolist()
    optimizer = torch.optim.SGD(model.parameters()) if comm.rank else None
    with pytest.raises(AgreementError, match="rank 1: .*broadcast_state of weight, bias, its optimizer"):
        ours.broadcast_state(model, optimizer, mpistrat.Communicator(comm))
    assert model.weight.tolist() == before


def test_without_a_communicator_all_ranks_of_the_job_take_part(torch, ours, comm):
    model = torch.nn.Linear(2, 1)
    ours.broadcast_state(model)
    with ours.average_gradients(model):
        (model(torch.ones(1, 2)).sum() * comm.rank).backward()
    assert model.bias.grad.item() == (comm.size - 1) / 2
    assert len({*comm.allgather(tuple(np.ravel(model.weight.detach().numpy())))}) == 1


class Layer(NamedTuple):
    weight: Any
    bias: Any


@pytest.fixture
def jax():
    return installed("jax")


@pytest.fixture
def average(jax, comm):
    with mpistrat.Communicator(comm) as communicator:
        yield lambda tree: mpistrat.jax.average(tree, communicator)


def test_leaves_are_averaged_the_tree_is_kept_and_another_one_is_told(jax, average, comm):
    numbers = jax.numpy
    layer = Layer(numbers.full((2, 3), comm.rank + 1.0), numbers.zeros(3))
    found = average({"layer": layer, "none": None, "step": [np.float32(comm.rank)]})
    mean = (comm.size + 1) / 2
    assert isinstance(found["layer"], Layer)
    assert isinstance(found["layer"].weight, jax.Array)
    assert found["layer"].weight.tolist() == [[mean] * 3] * 2
    assert (found["none"], float(found["step"][0])) == (None, mean - 1)
    assert average({}) == {}
    with pytest.raises(TypeError, match="average takes a Communicator, or None for all ranks of the job; got Intracomm"):
        mpistrat.jax.average({}, comm)
    ones = jax.numpy.ones(2)
    with pytest.raises(AgreementError, match="average of PyTreeDef"):
        average({"a": ones, "b": ones} if comm.rank else {"a": ones, "c": ones})


def test_whole_numbers_and_what_is_traced_are_refused(jax, average):
    with pytest.raises(UnsupportedDtypeError, match=r"tree\['steps'\] has dtype int32, whose mean would be a whole number"):
        average({"steps": jax.numpy.ones(2, "int32")})
    with pytest.raises(UnsupportedDtypeError, match=r"tree\['w'\]"):
        jax.jit(average)({"w": jax.numpy.ones(2)})
