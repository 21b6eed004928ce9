"""Whether MPI may be handed device memory: who is asked, who is believed, and what is kept."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from mpistrat.device.abstract import Identity
from mpistrat.device.binding import bind
from mpistrat.errors import SettingError
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.launch import cuda_awareness, environment
from mpistrat.launch.cuda_awareness import STARTED, Verdict, find_verdict, kept_verdicts, present_library, probe
from tests.gpu.stand_in import StandInDevice
from tests.launches import needs_ranks, up_to_ranks

pytestmark = up_to_ranks(2)  # one rank asks, for however many

FAKE_CUPY = Path(__file__).parents[1] / "gpu" / "fake_cupy"
YES, NO = Verdict(True, "says yes (a query)"), Verdict(False, "says no (a query)")


@pytest.fixture(autouse=True)
def folder(comm, tmp_path, monkeypatch):
    """Give the folder in which verdicts are kept, to a process with a GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MPISTRAT_MPI_GPU", raising=False)
    bind(StandInDevice())
    yield tmp_path / "mpistrat" / "cuda-aware"
    bind(None)


@pytest.fixture
def ask(monkeypatch):
    """Give a function that finds a verdict where these are the claims and the proof; it returns what was asked, too."""

    def find(library=None, proof=None):
        asked = []

        def answer(name, verdict):
            def told(*_):
                asked.append(name)
                return verdict

            return told

        monkeypatch.setattr(cuda_awareness, "_claim_of_library", answer("library", library))
        monkeypatch.setattr(cuda_awareness, "probe", answer("probe", proof))
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
    assert ask(NO if is_aware else YES, PROVED) == (verdict, []), "it is kept"


def test_what_was_found_is_kept_for_each_library(ask, folder, monkeypatch):
    ask(YES, CRASHED)
    [(library, verdict, date)] = kept_verdicts()
    assert (library, verdict.is_aware, len(date)) == (present_library(), False, 10)
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert ask(YES, PROVED)[1] == ["library", "probe"], "a library that is shaped otherwise is another one"
    document = json.loads((folder / library.file_name).read_text())
    document["library"]["modified"] += 1
    (folder / library.file_name).write_text(json.dumps(document))
    monkeypatch.delenv("UCX_TLS")
    assert ask(YES, PROVED)[1] == ["library", "probe"], "a file of another library was believed"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"library": {}, "verdict": {}, "date": ""}', "\0"])
def test_a_file_that_cannot_be_read_is_written_anew(ask, folder, text):
    folder.mkdir(parents=True)
    file = folder / present_library().file_name
    file.write_text(text)
    assert list(kept_verdicts()) == []
    ask(NO)
    assert json.loads(file.read_text())["verdict"]["is_aware"] is False


def test_a_verdict_in_words_is_not_believed(ask, folder):
    ask(NO)
    file = folder / present_library().file_name
    document = json.loads(file.read_text())
    document["verdict"]["is_aware"] = "no"  # which is true
    file.write_text(json.dumps(document))
    assert list(kept_verdicts()) == []


def test_what_is_not_final_is_asked_again(ask, folder):
    for _ in range(2):
        assert ask(None, Verdict(False, "a probe did not end", is_final=False))[1][-1] == "probe"
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_stops_nobody(ask, folder):
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    assert ask(YES, PROVED)[0].is_aware


def test_the_setting_beats_all_questions(ask, monkeypatch):
    for value, is_aware in (("on", True), ("off", False)):
        monkeypatch.setenv("MPISTRAT_MPI_GPU", value)
        told = Verdict(is_aware, f"MPISTRAT_MPI_GPU={value}", is_setting=True)
        assert ask(NO if is_aware else YES, PROVED) == (told, [])


def test_rank_0_finds_it_for_all(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "on" if comm.rank == 0 else "off")
    assert bcast_or_raise(comm, find_verdict).is_aware
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "perhaps" if comm.rank == 0 else "off")
    with pytest.raises(SettingError, match="auto, on, off are accepted"):
        bcast_or_raise(comm, find_verdict)


def test_what_keeps_rank_0_from_asking_is_told_to_all(comm, monkeypatch):
    def fail():
        raise OSError("planted: no more processes")

    monkeypatch.setenv("MPISTRAT_MPI_GPU", "auto")
    monkeypatch.setattr(cuda_awareness, "present_library", fail)
    verdict = bcast_or_raise(comm, find_verdict)
    assert (verdict.is_aware, verdict.is_final) == (False, False)
    assert verdict.reason == "the MPI library could not be queried (OSError: planted: no more processes)"


def test_this_library_is_recognised_and_asked():
    library = present_library()
    assert Path(library.path).name.startswith("libmpi")
    assert library.modified > 0
    claim = cuda_awareness._claim_of_library()
    if "Open MPI" in library.version or "MPICH" in library.version:
        assert claim is not None
        assert "(MPIX_Query_cuda_support)" in claim.reason


def test_no_probe_is_started_on_a_gpu_that_serves_one_process(ask):
    class Exclusive(StandInDevice):
        def is_exclusive(self):
            return True

    bind(Exclusive())
    verdict, asked = ask(YES, PROVED)
    assert (verdict.is_aware, verdict.is_final, asked) == (False, False, ["library"])
    assert "says yes (a query), and the GPU is in EXCLUSIVE_PROCESS mode, so CUDA-awareness cannot be probed" in verdict.reason


@needs_ranks(2)
@pytest.mark.parametrize(
    ("fault", "is_aware", "reason", "is_final"),
    [
        ("none", True, "a probe sent device memory and got it back", True),
        ("wrong", False, "a probe got wrong values", True),
        ("crash", False, "a probe died of SIG", True),
        ("broken", False, "a probe failed: RuntimeError: cudaErrorInvalidDevice: 3", False),
        ("stuck", False, "a probe did not end within 0.3 s", False),
    ],
)
def test_a_probe_runs_beside_a_job_whatever_becomes_of_it(comm, monkeypatch, fault, is_aware, reason, is_final):
    if comm.rank == 0:
        monkeypatch.setenv("PYTHONPATH", f"{FAKE_CUPY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setenv("FAKE_CUPY", fault)
        verdict = probe(3, 0.3 if fault == "stuck" else 60.0)
        assert (verdict.is_aware, verdict.is_final) == (is_aware, is_final), verdict
        assert verdict.reason.startswith(reason)
    comm.Barrier()


@pytest.mark.parametrize(
    ("code", "output", "is_final"),
    [
        (-signal.SIGSEGV, f"{STARTED}\n", True),
        (-signal.SIGBUS, f"{STARTED}\nCaught signal 7\n", True),
        (-signal.SIGSEGV, "in MPI_Init\n", False),
        (-signal.SIGABRT, f"{STARTED}\n", False),
        (-signal.SIGKILL, f"{STARTED}\n", False),
    ],
)
def test_only_a_crash_in_a_message_is_an_answer_for_ever(code, output, is_final):
    assert cuda_awareness._judged(code, output).is_final is is_final


def test_a_probe_finds_no_launcher_but_what_shapes_the_library():
    dropped = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess_base_jobid", "PRTE_MCA_x", "HYDI_CONTROL_FD")
    dropped += ("OMPI_MCA_num_procs", "OMPI_MCA_cpu_type", "OMPI_MCA_PREFIXES")  # a job of another size need not ask again
    dropped += ("SLURM_PROCID", "MPI_LOCALRANKID", "I_MPI_HYDRA_ENV", "PALS_RANKID", "MV2_COMM_WORLD_RANK")
    kept = ("OMPI_MCA_pml", "UCX_TLS", "I_MPI_OFFLOAD", "PATH", "CUDA_VISIBLE_DEVICES", "OMPI_MCA_btl")
    environ = dict.fromkeys((*dropped, *kept), "1")
    assert set(environment.without_launcher(environ)) == set(kept)


def test_which_gpu_is_probed_is_the_one_that_is_bound(monkeypatch):
    class Third(StandInDevice):
        index = 3

        def identity(self):
            return Identity("", "", "")

    probed = []
    bind(Third())
    monkeypatch.setattr(cuda_awareness, "_claim_of_library", lambda: None)
    monkeypatch.setattr(cuda_awareness, "probe", lambda index: probed.append(index) or PROVED)
    assert find_verdict().is_aware
    assert probed == [3]
