"""Whether MPI may be handed device memory: who is asked, and who is believed."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from mpistrat.device.binding import bind
from mpistrat.device.cuda import Identity
from mpistrat.errors import SettingError
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.launch import cuda_awareness, environment
from mpistrat.launch.bootstrap import library_version
from mpistrat.launch.cuda_awareness import Verdict, find_verdict, probe
from tests.gpu.stand_in import StandInDevice
from tests.launches import needs_ranks, up_to_ranks

pytestmark = up_to_ranks(2)  # one rank asks, for however many

FAKE_CUPY = Path(__file__).parents[1] / "gpu" / "fake_cupy"
YES, NO = Verdict(True, "says yes (a query)"), Verdict(False, "says no (a query)")


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Give a process with a GPU that has not asked yet."""
    monkeypatch.delenv("MPISTRAT_MPI_GPU", raising=False)
    cuda_awareness._ask.cache_clear()
    bind(StandInDevice())
    yield
    bind(None)
    cuda_awareness._ask.cache_clear()


@pytest.fixture
def ask(monkeypatch):
    """Give a function that finds a verdict where these are the claims and the proof; it returns what was asked, too."""

    def find(library=None, proof=None):
        asked = []
        monkeypatch.setattr(cuda_awareness, "_claim_of_library", lambda: asked.append("library") or library)
        monkeypatch.setattr(cuda_awareness, "probe", lambda _: asked.append("probe") or proof)
        cuda_awareness._ask.cache_clear()
        return find_verdict(), asked

    return find


PROVED, CRASHED = Verdict(True, "a probe sent it"), Verdict(False, "a probe died of SIGSEGV")


@pytest.mark.parametrize(
    ("library", "proof", "asked", "is_aware", "says"),
    [
        (NO, PROVED, ["library"], False, "says no (a query)"),
        (YES, PROVED, ["library", "probe"], True, "says yes (a query), and a probe sent it"),
        (YES, CRASHED, ["library", "probe"], False, "says yes (a query), and a probe died of SIGSEGV"),
        (None, CRASHED, ["library", "probe"], False, "a probe died of SIGSEGV"),
    ],
)
def test_a_no_is_believed_and_a_yes_is_proved(ask, library, proof, asked, is_aware, says):
    verdict, were_asked = ask(library, proof)
    assert were_asked == asked
    assert verdict.is_aware is is_aware
    assert verdict.reason.endswith(says)


def test_a_no_of_open_mpi_is_no_answer_where_ucx_moves_the_memory(ask, monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 0  /opt/ucx/lib/ucx/libuct_cuda.so.0.0.0\n")
    assert cuda_awareness._has_ucx_of_cuda(maps)
    assert not cuda_awareness._has_ucx_of_cuda()
    monkeypatch.setattr(cuda_awareness, "_has_ucx_of_cuda", lambda: True)
    for proof in (PROVED, CRASHED):
        verdict, asked = ask(NO, proof)
        assert (verdict.is_aware, asked) == (proof.is_aware, ["library", "probe"])
        assert verdict.reason.endswith(f"says no (a query), but UCX has loaded its module for CUDA, and {proof.reason}")


def test_what_was_found_is_not_asked_again_and_the_setting_beats_all_questions(ask, monkeypatch):
    verdict, _ = ask(YES, PROVED)
    monkeypatch.setattr(cuda_awareness, "_claim_of_library", lambda: NO)
    assert find_verdict() is verdict
    for value, is_aware in (("on", True), ("off", False)):
        monkeypatch.setenv("MPISTRAT_MPI_GPU", value)
        told = Verdict(is_aware, f"MPISTRAT_MPI_GPU={value}", is_setting=True)
        assert ask(NO if is_aware else YES, PROVED) == (told, [])


def test_rank_0_finds_it_for_all_or_tells_what_keeps_it_from_asking(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "on" if comm.rank == 0 else "off")
    assert bcast_or_raise(comm, find_verdict).is_aware
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "perhaps" if comm.rank == 0 else "off")
    with pytest.raises(SettingError, match="auto, on, off are accepted"):
        bcast_or_raise(comm, find_verdict)
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "auto")
    monkeypatch.setattr(cuda_awareness, "_claim_of_library", Mock(side_effect=OSError("planted: no more processes")))
    verdict = bcast_or_raise(comm, find_verdict)
    assert not verdict.is_aware
    assert verdict.reason == "the MPI library could not be queried (OSError: planted: no more processes)"


def test_this_library_is_recognised_and_asked():
    claim = cuda_awareness._claim_of_library()
    if library_version().startswith(("Open MPI", "MPICH")):
        assert claim is not None
        assert "(MPIX_Query_cuda_support)" in claim.reason


def test_no_probe_is_started_on_a_gpu_that_serves_one_process(ask):
    class Exclusive(StandInDevice):
        def is_exclusive(self):
            return True

    bind(Exclusive())
    verdict, asked = ask(YES, PROVED)
    assert (verdict.is_aware, asked) == (False, ["library"])
    assert "says yes (a query), and the GPU is in EXCLUSIVE_PROCESS mode, so CUDA-awareness cannot be probed" in verdict.reason


@needs_ranks(2)
@pytest.mark.parametrize(
    ("fault", "is_aware", "reason"),
    [
        ("none", True, "a probe sent device memory and got it back"),
        ("wrong", False, "a probe got wrong values"),
        ("crash", False, "a probe died of SIG"),
        ("broken", False, "a probe failed: RuntimeError: cudaErrorInvalidDevice: 3"),
        ("stuck", False, "a probe did not end within 0.3 s"),
        ("killed", True, "a probe sent device memory and got it back"),
    ],
)
def test_a_probe_runs_beside_a_job_whatever_becomes_of_it(comm, monkeypatch, tmp_path, fault, is_aware, reason):
    if comm.rank == 0:
        monkeypatch.setenv("PYTHONPATH", f"{FAKE_CUPY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setenv("FAKE_CUPY", f"{fault} {tmp_path / 'was killed'}" if fault == "killed" else fault)
        verdict = probe(3, 0.3 if fault == "stuck" else 60.0)
        assert verdict.is_aware is is_aware, verdict
        assert verdict.reason.startswith(reason)
    comm.Barrier()


def test_a_probe_finds_no_launcher_but_what_shapes_the_library():
    dropped = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess_base_jobid", "PRTE_MCA_x", "HYDI_CONTROL_FD")
    dropped += ("OMPI_MCA_num_procs", "OMPI_MCA_cpu_type", "OMPI_MCA_PREFIXES")  # a job of another size need not ask again
    dropped += ("SLURM_PROCID", "MPI_LOCALRANKID", "I_MPI_HYDRA_ENV", "PALS_RANKID", "MV2_COMM_WORLD_RANK")
    kept = ("OMPI_MCA_pml", "UCX_TLS", "I_MPI_OFFLOAD", "PATH", "CUDA_VISIBLE_DEVICES", "OMPI_MCA_btl")
    assert set(environment.without_launcher(dict.fromkeys((*dropped, *kept), "1"))) == set(kept)


def test_which_gpu_is_probed_is_the_one_that_is_bound(monkeypatch):
    class Third(StandInDevice):
        def identity(self):
            return Identity("", "", "")

    probed = []
    bind(Third(index=3))
    monkeypatch.setattr(cuda_awareness, "_claim_of_library", lambda: None)
    monkeypatch.setattr(cuda_awareness, "probe", lambda index: probed.append(index) or PROVED)
    assert find_verdict().is_aware
    assert probed == [3]
