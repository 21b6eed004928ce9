"""Hostfiles: one that mpiexec would refuse with a page of its own is refused with a line."""

from pathlib import Path

import pytest

from mpistrat.errors import InvalidArgumentError
from mpistrat.launch.hostfile import check_hostfile

SLOTS = {"Open MPI": "node1 slots=4", "MPICH": "node1:4"}


@pytest.mark.parametrize(
    ("mpi", "text"),
    [
        ("Open MPI", "# ours\n\nnode1 slots=4\nnode2   # as many as it has cores\n"),
        ("Open MPI", "[fe80::1] slots=2 max_slots=4\n"),
        ("MPICH", "node1:4\nnode2:4\n"),
        ("MPICH", "node1\n"),
    ],
)
def test_files_as_the_mpiexec_reads_them_pass(tmp_path: Path, mpi: str, text: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    check_hostfile(path, mpi, SLOTS[mpi])


@pytest.mark.parametrize(
    ("mpi", "content", "message"),
    [
        ("Open MPI", None, "--hostfile {path} cannot be read: No such file or directory"),
        ("MPICH", b"\xff\xfe", "--hostfile {path} cannot be read: it is not a text"),
        ("Open MPI", b"\n# node1\n", "--hostfile {path} names no host; a line is 'node1 slots=4' for four ranks there"),
        (
            "Open MPI",
            b"node1\nnode2:4\n",
            "--hostfile {path}, line 2: 'node2:4' is not how Open MPI counts slots; four on a host are 'node1 slots=4'",
        ),
        (
            "MPICH",
            b"node1 slots=4\n",
            "--hostfile {path}, line 1: 'node1 slots=4' is not how MPICH counts slots; four on a host are 'node1:4'",
        ),
    ],
)
def test_others_are_refused(tmp_path: Path, mpi: str, content: bytes | None, message: str) -> None:
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgumentError) as caught:
        check_hostfile(path, mpi, SLOTS[mpi])
    assert str(caught.value) == message.format(path=path)
