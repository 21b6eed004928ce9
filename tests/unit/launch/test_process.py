"""Processes: who started whom, and which of them are launchers."""

import os
import subprocess
import sys
from dataclasses import replace

from mpistrat.launch import process


def test_ancestors_begin_with_the_parent_and_launchers_are_known_by_their_names():
    found = list(process.ancestors())
    assert found[0].pid == os.getppid()
    assert [each.parent for each in found[:-1]] == [each.pid for each in found[1:]]
    assert found[-1].parent == 0
    assert [each.pid for each in process.ancestors(found[0].pid)] == [each.pid for each in found[1:]]
    own = process.find(os.getpid())
    launchers = "mpiexec mpiexec.hydra mpirun mpirun_rsh mpispawn orted orterun prte prted prterun hydra_pmi_proxy "
    launchers += "hydra_bstrap_pr slurmstepd palsd"
    others = ["python3", "bash", "mpiexec_wrapper", "my_mpirun.sh", "sshd"]
    found = [name for name in [*launchers.split(), *others] if replace(own, name=name).is_launcher]
    assert found == launchers.split()


def test_a_process_is_gone_when_it_has_exited_or_its_pid_is_another_ones(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = process.find(child.pid)
    assert not found.is_gone()
    assert replace(found, started=found.started - 1).is_gone()
    child.communicate(b"\n")
    assert found.is_gone()
    own = process.find(os.getpid())

    def fail(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("pathlib.Path.read_text", fail)
    assert not own.is_gone()
    assert process.find(os.getpid()) is None


def test_a_launcher_that_a_rank_has_started_is_that_of_its_ranks_although_it_has_the_variables_of_the_outer_one(monkeypatch):
    outer_rank, own = {"PMI_RANK": "0", "PMI_SIZE": "2"}, process.find(os.getpid())
    chain = [replace(own, name=name) for name in ("bash", "hydra_pmi_proxy", "python3", "mpiexec.hydra")]
    monkeypatch.setattr(process, "ancestors", lambda *_: chain)
    monkeypatch.setattr(process.Process, "environment", lambda self: {} if self is chain[-1] else outer_rank)
    assert process.find_launcher(outer_rank) is chain[1]
    assert process.find_launcher({}) is None
