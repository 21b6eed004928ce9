"""PyTorch's gloo: all_reduce of a tensor, and the buckets of DistributedDataParallel."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from turns import Task, is_right, serve

hosts, rank = os.environ["CONTEST_HOSTS"].split(","), int(os.environ["CONTEST_RANK"])
expected = len(hosts) * (len(hosts) + 1) // 2


def all_reduce(request):
    """Sum one tensor of float32, in place."""
    source = torch.full((request["nbytes"] // 4,), rank + 1.0)
    target = torch.empty_like(source)

    def meet():
        target.copy_(source)  # the sum takes the place of what is summed
        dist.barrier()

    return Task(lambda: dist.all_reduce(target), lambda: is_right([target], expected), meet)


def many(request):
    """Sum tensors of float32: ``how`` is ``each``, or ``ddp``: the gradients of a model, in its buckets."""
    if request["how"] == "ddp":
        return ddp(request["counts"])
    sources = [torch.full((count,), rank + 1.0) for count in request["counts"]]
    targets = [torch.empty_like(source) for source in sources]

    def run():
        for target in targets:
            dist.all_reduce(target)

    def meet():
        for source, target in zip(sources, targets):  # noqa: B905 - equally many
            target.copy_(source)
        dist.barrier()

    return Task(run, lambda: is_right(targets, expected), meet)


class Gradients(torch.nn.Module):
    """A model whose backward pass does nothing but hand out gradients."""

    def __init__(self, counts):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(count) for count in counts])

    def forward(self, scale):
        """Return a number whose derivative by every weight is the scale."""
        return scale * sum(weight.sum() for weight in self.weights)


def ddp(counts):
    """Make a backward pass, with the sums that it starts."""
    model = DistributedDataParallel(Gradients(counts))
    state = {}

    def meet():
        model.zero_grad(set_to_none=True)
        state["loss"] = model(rank + 1.0)
        dist.barrier()

    def is_mean():
        gradients = [weight.grad for weight in model.parameters()]
        return all(gradient is not None and bool((gradient == expected / len(hosts)).all()) for gradient in gradients)

    return Task(lambda: state["loss"].backward(), is_mean, meet)


if __name__ == "__main__":
    torch.set_num_threads(1)
    interface = "eth0" if len(set(hosts)) > 1 else "lo"
    os.environ.update(MASTER_ADDR=hosts[0], MASTER_PORT="29555", WORLD_SIZE=str(len(hosts)), RANK=str(rank))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group("gloo")
    serve(rank, {"PyTorch": torch.__version__}, {"all_reduce": all_reduce, "many": many})
