"""Bare mpi4py, with whatever MPI it loads: its reductions, as a program calls them that knows nothing else."""

import importlib.metadata

import numpy as np
from mpi4py import MPI
from turns import Task, is_right, serve

comm = MPI.COMM_WORLD
expected, meet = comm.size * (comm.size + 1) // 2, MPI.COMM_WORLD.Barrier


def all_reduce(request):
    source = np.full(request["nbytes"] // 4, comm.rank + 1, np.float32)
    target = np.empty_like(source)
    return Task(lambda: comm.Allreduce(source, target), lambda: is_right([target], expected), meet)


def reduce_scatter(request):
    """Sum one array of float32, and get a part of it; the parts are equal."""
    source = np.full(request["nbytes"] // 4, comm.rank + 1, np.float32)
    target = np.empty(source.size // comm.size, np.float32)
    counts = [target.size] * comm.size
    return Task(lambda: comm.Reduce_scatter(source, target, counts), lambda: is_right([target], expected), meet)


def many(request):
    """Sum arrays of float32, one call for each."""
    sources = [np.full(count, comm.rank + 1, np.float32) for count in request["counts"]]
    targets = [np.empty_like(source) for source in sources]

    def run():
        for source, target in zip(sources, targets):  # noqa: B905 - equally many
            comm.Allreduce(source, target)

    return Task(run, lambda: is_right(targets, expected), meet)


def main():
    """Answer requests, and say which MPI this is."""
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].replace("Version", "").replace(":", " ")
    name, _, version = " ".join(library.replace("\0", "").split()).rpartition(" ")
    versions = {name: version.lstrip("v"), "mpi4py": importlib.metadata.version("mpi4py")}
    serve(comm.rank, versions, {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "many": many})


if __name__ == "__main__":
    main()
