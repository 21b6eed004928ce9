"""The program of mpi4py with one line changed: its communicator is wrapped."""

import mpi_ranks

import mpistrat.mpi4py

mpi_ranks.comm = mpistrat.mpi4py.wrap(mpi_ranks.comm)

if __name__ == "__main__":
    mpi_ranks.main()
