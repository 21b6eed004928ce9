"""Eight ranks on four hosts with names, links and memory of their own: right topology, exact sums, no byte too many."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.launch.process import find
from tests.hosts.lab import Lab
from tests.processes import run_bounded, until

_ROOT = Path(__file__).parents[2]
_PLACEMENTS = {
    "random": {"node0": [1, 4], "node1": [6, 7], "node2": [0, 3], "node3": [2, 5]},
    "3+1+2+2": {"node0": [0, 1, 2], "node1": [3], "node2": [4, 5], "node3": [6, 7]},
}


@pytest.fixture(scope="module", params=_PLACEMENTS)
def job(request, lab, tmp_path_factory):
    """Give the placement of a job of 8 ranks, and what its rank 0 found."""
    found = tmp_path_factory.mktemp("hosts") / "found.json"
    argv = [sys.executable, str(Path(__file__).parent / "programs" / "all_reduce.py"), str(found)]
    done = lab.run(8, request.param, argv, timeout=120, env={"PYTHONPATH": str(_ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    return request.param, json.loads(found.read_text())


def test_topology_is_found_every_verb_is_exact_and_each_host_sends_no_more_than_it_must(job):
    placement, found = job
    assert found["nodes"] == _PLACEMENTS[placement]
    assert found["compared"] > 200
    hosts = len(found["nodes"])
    least = 2 * (hosts - 1) / hosts * found["buffer_bytes"]
    ratios = {host: sent / least for host, sent in found["bytes_per_all_reduce"].items()}
    assert {host: ratio for host, ratio in ratios.items() if not 1.0 <= ratio <= 1.1} == {}, ratios


def test_the_links_are_shaped_and_what_a_host_sends_is_counted(lab):
    # Not faster than the rate: a lab that let bytes round the links would prove nothing. How near they come is not judged.
    assert 0 < lab.goodput_bits(rounds=1, seconds=1.0) < 1.0e9
    before = lab.bytes_sent()
    lab.output("node1", [sys.executable, "-c", "import socket; socket.socket(2, 2).sendto(b'x' * 1000, ('node2', 9))"])
    sent = {host: count - before[host] for host, count in lab.bytes_sent().items()}
    assert 1000 <= sent["node1"] < 2000
    assert sent["node3"] < 1000


def test_a_hostfile_of_mpistrat_run_takes_settings_to_every_host(lab, tmp_path):
    agent, hosts = tmp_path / "agent", tmp_path / "hosts"
    agent.write_text(f'#!/bin/bash\nunset MPISTRAT_CHUNK_BYTES\nexec {lab.agent} "$@"\n')  # as ssh would
    agent.chmod(0o755)
    hosts.write_text("node0 slots=1\nnode1 slots=1\n")
    (tmp_path / "job.py").write_text("import os; print(os.uname().nodename, os.environ.get('MPISTRAT_CHUNK_BYTES'))")
    job = [sys.executable, "-m", "mpistrat", "run", "-n", "2", "--hostfile", str(hosts), str(tmp_path / "job.py")]
    _, variables = lab.mpirun(2, "1+1+0+0", job)
    own = {"PYTHONPATH": str(_ROOT), "MPISTRAT_CHUNK_BYTES": "4096", "PRTE_MCA_plm_ssh_agent": str(agent)}
    done = run_bounded(lab.on("node0", job), 60, lab.environment(**{**variables, **own}))
    assert sorted(done.stdout.splitlines()) == ["node0 4096", "node1 4096"], done.stderr


def test_a_program_that_fails_or_hangs_is_reported(lab):
    assert lab.run(2, "1+1+0+0", [sys.executable, "-c", "raise SystemExit(7)"], timeout=60).returncode == 7
    hung = lab.run(2, "1+1+0+0", [sys.executable, "-c", "import time; time.sleep(300)"], timeout=2)
    assert hung.returncode == 124
    assert "killed: still running after 2 s" in hung.stderr


def test_nothing_is_left_of_a_lab():
    with Lab(hosts=2) as small:
        first = small._first
        assert Path(f"/proc/{first}").exists()
        assert small.folder.exists()
    assert not Path(f"/proc/{first}").exists()
    assert not small.folder.exists()


def test_a_lab_ends_with_the_process_that_asked_for_it():
    program = "from tests.hosts.lab import Lab; lab = Lab(hosts=2).__enter__(); print(lab._first, flush=True); input()"
    pipe = subprocess.PIPE
    asking = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True, cwd=_ROOT)
    assert asking.stdout is not None
    first = int(asking.stdout.readline())
    assert find(first)
    os.kill(asking.pid, signal.SIGKILL)
    asking.communicate()
    assert until(lambda: find(first) is None, 10)
