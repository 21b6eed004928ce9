"""One rank of training steps of PyTorch: DistributedDataParallel on gloo, and `average_gradients`, in turns.

``mpistrat run -n 2 tests/benchmarks/peers/data_parallel_ranks.py 10000 1000000 25000000``: numbers of parameters.
Rank 0 prints the median seconds of a step of both.
"""

import json
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpistrat.torch
from mpistrat.tools.bench import Race

LAYERS = 8


def main() -> None:
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    join_gloo(comm)
    for count in map(int, sys.argv[1:]):
        steps = {"ddp": _step(count, is_ours=False), "ours": _step(count, is_ours=True)}
        gradients = {name: step() for name, step in steps.items()}
        for one, other in zip(*gradients.values(), strict=True):
            torch.testing.assert_close(one, other)
        medians = dict(zip(steps, Race(comm, list(steps.values())).run(), strict=True))
        if comm.rank == 0:
            print(json.dumps({"parameters": count, **medians}), flush=True)
    dist.destroy_process_group()


def join_gloo(comm: MPI.Intracomm) -> None:
    """Join the ranks in a process group of PyTorch."""
    hosts = comm.allgather(socket.gethostname())
    host = "127.0.0.1" if len(set(hosts)) == 1 else socket.gethostbyname(hosts[0])
    port = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
    port = comm.bcast(port)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size)


def _model(count: int) -> torch.nn.Module:
    torch.manual_seed(0)
    width = max(1, round((count / LAYERS) ** 0.5))
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))


def _rows(model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(8, next(model.parameters()).shape[1], generator=generator)


def _step(count: int, is_ours: bool) -> Callable[[], list[torch.Tensor | None]]:
    model = _model(count)
    rows, averaging, forward = _rows(model), nullcontext, model
    if is_ours:
        mpistrat.torch.broadcast_state(model)
        averaging = partial(mpistrat.torch.average_gradients, model)
    else:
        forward = torch.nn.parallel.DistributedDataParallel(model)

    def step() -> list[torch.Tensor | None]:
        model.zero_grad()
        loss = forward(rows).square().mean()
        with averaging():
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    return step


if __name__ == "__main__":
    main()
