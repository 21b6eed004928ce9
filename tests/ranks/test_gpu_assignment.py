"""The GPU assignment of all ranks is checked, on GPUs of a fake CUDA."""

import os
from unittest.mock import Mock

import pytest

from mpistrat.communicator.communicator import Communicator
from mpistrat.device.binding import bind, bound_device
from mpistrat.errors import AgreementError, LaunchError, SettingError, TopologyError
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.launch.bootstrap import bind_device
from mpistrat.launch.environment import LauncherView, detect
from mpistrat.text import ranks_text
from mpistrat.topology.discover import check_gpu_assignment
from tests.gpu.fake_cuda import FakeCuda
from tests.gpu.stand_in import StandInDevice
from tests.launches import needs_ranks


@pytest.fixture
def fake(monkeypatch):
    return FakeCuda(monkeypatch)


def _view(comm, local_rank=None):
    return LauncherView("srun", comm.rank, comm.size, comm.rank if local_rank is None else local_rank, comm.size)


def test_each_rank_drives_a_gpu_of_its_own(fake, comm, said, monkeypatch):
    monkeypatch.setenv("MPISTRAT_VERBOSE", "1")
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", f"{comm.size}x1")  # the GPUs are those of the machine, whatever is pretended
    fake.show(*range(comm.size))
    bind_device(_view(comm))
    with rendezvous("a test") as job:
        assert job.world.num_nodes == comm.size
    assert bound_device().index == comm.rank
    told = said.getvalue().splitlines()
    assert len(told) == (comm.size if comm.rank == 0 else 0)
    if comm.size > 1 and comm.rank == 0:
        assert told[1].startswith("mpistrat: rank 1: NVIDIA H200 0000:18:00.0 on ")
        assert told[1].endswith(f"; local rank 1 of {comm.size} on a node with {comm.size} GPUs")


@pytest.mark.parametrize("is_told", [True, False], ids=["by the launcher of this very job", "by nobody, but found"])
def test_each_rank_is_told_its_gpu(fake, comm, is_told):
    fake.show(*range(comm.size))
    bind_device(detect() if is_told else None)
    assert is_told or bound_device().index == 0
    check_gpu_assignment(comm)
    assert bound_device().index == comm.rank


def test_ranks_without_gpus_have_nothing_to_say_but_why_when_asked(fake, comm, said, monkeypatch):
    bind_device(_view(comm))
    check_gpu_assignment(comm)
    assert said.getvalue() == ""
    monkeypatch.setenv("MPISTRAT_VERBOSE", "1")
    check_gpu_assignment(comm)
    assert said.getvalue() == ("mpistrat: computing on CPUs: CuPy is not installed\n" if comm.rank == 0 else "")


def test_a_device_that_was_bound_by_hand_takes_part(fake, comm):
    bind(StandInDevice())
    check_gpu_assignment(comm)


def test_a_setting_that_rank_0_cannot_read_and_a_gpu_that_one_rank_cannot_ask_are_told_to_all(fake, comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_VERBOSE", "maybe" if comm.rank == 0 else "")
    bind_device(_view(comm))
    with pytest.raises((SettingError, AgreementError), match="MPISTRAT_VERBOSE='maybe'"):
        Communicator(comm)
    fake.show(*range(comm.size))
    bind_device(_view(comm))
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(bound_device(), "identity", Mock(side_effect=RuntimeError("cudaErrorECCUncorrectable: planted")))
    told = f"rank {comm.size - 1} on .*: device .* cannot be identified: cudaErrorECCUncorrectable"
    with pytest.raises(LaunchError, match=told):
        check_gpu_assignment(comm)


@needs_ranks(2)
@pytest.mark.parametrize(
    ("wanted", "error", "told"),
    [
        ("gpu", LaunchError, "rank 0 on .*: MPISTRAT_DEVICE=gpu was set, but CuPy is not installed. Ask"),
        ("auto", TopologyError, r"rank 0 without: .* \(on .*: CuPy is not installed\)"),
    ],
)
def test_a_mixed_job_is_refused_and_says_why_some_have_none(fake, comm, monkeypatch, wanted, error, told):
    monkeypatch.setenv("MPISTRAT_DEVICE", wanted)
    fake.show(*range(comm.size) if comm.rank else ())
    bind_device(_view(comm))
    with pytest.raises(error, match=told) as raised:
        check_gpu_assignment(comm)
    assert raised.value.raised_everywhere


@needs_ranks(2)
@pytest.mark.parametrize("allowed", ["", "1", "maybe"])
def test_more_ranks_than_gpus_is_refused_unless_allowed(fake, comm, monkeypatch, allowed):
    monkeypatch.setenv("MPISTRAT_ALLOW_SHARED_GPU", allowed if comm.rank == 0 else "")
    fake.show(*range(comm.size - 1))
    bind_device(_view(comm))
    if allowed == "1":
        check_gpu_assignment(comm)
        return
    with pytest.raises(TopologyError, match=f"{ranks_text([0, comm.size - 1])} drive the same GPU"):
        check_gpu_assignment(comm)


@needs_ranks(2)
def test_a_local_rank_that_is_another_ones_is_refused_with_both_values(fake, comm):
    """Under mpirun inside SLURM each rank has the SLURM_LOCALID of mpirun's daemon: 0."""
    fake.show(*range(comm.size))
    bind_device(_view(comm, 0))
    expected = rf"rank 1 on .* because srun set its local rank to 0; .* it is local rank 1 of {comm.size}"
    with pytest.raises(LaunchError, match=expected):
        check_gpu_assignment(comm)


@needs_ranks(2)
def test_ranks_that_do_not_see_their_neighbours_gpus_are_told_how_to(fake, comm, said):
    fake.show(comm.rank)
    bind_device(_view(comm))
    check_gpu_assignment(comm)
    told = said.getvalue()
    assert ("sees only its own GPU" in told) == ("--gpu-bind=none" in told) == (comm.rank == 0)


def test_what_cuda_is_shown_is_left_alone(fake, comm, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    fake.show(*range(comm.size))
    bind_device(_view(comm))
    check_gpu_assignment(comm)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
