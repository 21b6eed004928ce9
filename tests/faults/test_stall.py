"""Ranks wait for one that does not come: one of them says for whom, where that is, and, where it is in vain, all end."""

import json
import re
import socket
import textwrap
from pathlib import Path

import pytest

from tests.faults.jobs import LIMIT_SECONDS, PROLOGUE
from tests.processes import patient

HOST = socket.gethostname()

# rank 1 does something else in `odd`; where nothing else would end the job, rank 0 does
PROGRAM = """
    import re

    def give_up(seconds):
        if comm.rank == 0:
            timer = threading.Timer(seconds, os._exit, [9])
            timer.daemon = True
            timer.start()

    def step():
        return mpistrat.get_replica_context().all_reduce("sum", np.ones(3))

    def odd():
        {fault}

    {before}
    mine.Barrier()
    give_up({seconds})
    if comm.rank == 1:
        note_fault()
        odd()
    {after}
"""
MADE = "strategy = mpistrat.MultiWorkerMirroredStrategy(); strategy.run(step); strategy.run(step)"
MAKE = "strategy = mpistrat.MultiWorkerMirroredStrategy()"


def program(fault, before=MADE, after="strategy.run(step)", seconds=5.0):
    return PROGRAM.format(fault=fault, before=before, after=after, seconds=seconds)


def reports(ended):
    """Return the lines of each stall report."""
    blocks = []
    for line in ended.stderr.replace("\0", "").splitlines():
        if re.match(r"mpistrat: rank \d+ \(.*\) has waited ", line):
            blocks.append([line])
        elif line.startswith("mpistrat:   "):
            blocks[-1].append(line)
    return blocks


# what rank 1 does, what all have done before, what the others do; after which of the reports, each after twice the time, is
# enough told of rank 1, and what
LATE = "while not Path('go').exists(): time.sleep(0.01)"
KINDS = {
    "late": (LATE, MADE, "strategy.run(step); print('done')", 2, "alive; last collective .*; now at .*job.py:LINE (odd)"),
    "before its first strategy": ("time.sleep(1000)", "pass", MAKE, 1, "alive, and has made no strategy yet"),
    "in C": ("re.match('(a+)+$', 40 * 'a' + 'b')", MADE, "strategy.run(step)", 2, "alive, but its Python does not run"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_tells_who_is_missing_and_the_job_waits_on(job, kind):
    fault, before, after, count, found = KINDS[kind]
    # a rank whose Python does not run is known after 3 seconds
    patience = 2.0 if kind == "in C" else 1.0
    text = program(fault, before, after, 60)

    def is_told(stderr):
        is_enough = stderr.count("missing: rank 1") >= count and stderr.endswith("\n")
        if is_enough:
            (job.folder / "go").touch()
        return is_enough and kind != "late"

    ended = job(3, text, enough=is_told, MPISTRAT_STALL_SECONDS=str(patience))
    if kind == "late":
        assert (ended.code, ended.stdout.split()) == (0, ["done"] * 3), ended.stderr
    blocks = reports(ended)
    assert len(blocks) == count, ended.stderr
    for block, waited in zip(blocks, (patience, 2 * patience), strict=False):
        head = re.match(rf"mpistrat: rank [02] \({HOST}\) has waited (\d+\.\d) s in collective \d+, ", block[0])
        assert head is not None, block
        assert waited - 0.3 < float(head[1]) < waited + patient(1)
        assert block[1].startswith(f"mpistrat:   in it: ranks 0, 2 ({HOST}), since ")
        assert re.search(r", from .*job\.py:\d+ \((step|<module>)\)$", block[1])
    lines = (PROLOGUE + textwrap.dedent(text)).splitlines()
    wanted = re.escape(found).replace(r"\.\*", ".*").replace("LINE", str(1 + lines.index(f"    {fault}")))
    assert re.search(rf"missing: rank 1 \({HOST}, pid {ended.pids[1]}\): {wanted}", blocks[-1][2]), blocks[-1]


def test_under_a_deadline_a_rank_that_is_stopped_ends_the_job(job):
    text = program("os.kill(os.getpid(), signal.SIGSTOP)", seconds=LIMIT_SECONDS)
    ended = job(2, text, MPISTRAT_TIMEOUT_SECONDS="1.5", MPISTRAT_STALL_SECONDS="0")
    assert ended.code != 0
    assert reports(ended) == [], "they are turned off"
    assert ended.seconds < LIMIT_SECONDS
    assert "DeadlineExceededError: rank " in ended.marked[-1]
    assert f"did not end within 1.5 s; not all ranks have arrived: missing rank 1 ({HOST})" in ended.marked[-1]
    assert not ended.leftovers


INTERRUPTED = """
    from mpistrat.communicator import communicator

    def interrupted(*_):
        raise KeyboardInterrupt

    made = mpistrat.Communicator(comm)
    made.all_reduce("sum", np.ones(300_000))
    if comm.rank == 1:
        {there} = interrupted
    try:
        {call}
    except KeyboardInterrupt:
        time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("there", "call", "told"),
    [
        ("communicator.Executor", "mpistrat.Communicator(comm)", "Communicator: its plans and memory"),
        ("made._owned.close", "made.close()", "Communicator: close"),
    ],
)
def test_a_rank_that_is_interrupted_in_what_others_wait_in_is_missed(job, there, call, told):
    text = INTERRUPTED.format(there=there, call=call)
    ended = job(2, text, enough=lambda stderr: "failed in it: rank 1" in stderr, MPISTRAT_STALL_SECONDS="1")
    assert re.search(rf"mpistrat: rank 0 \(.*\) has waited .*, {told}\n", ended.stderr), ended.stderr


def test_pairs_that_wait_each_for_a_rank_of_their_own_do_not_wait_for_each_other(job):
    made = "pair = mpistrat.Communicator(comm.Split(comm.rank // 2)); pair.barrier()"
    late = "comm.rank % 2 and time.sleep(2); pair.barrier(); print('done')"
    ended = job(4, program("pass", made, late, seconds=30), MPISTRAT_STALL_SECONDS="1")
    assert (ended.code, ended.stdout.split()) == (0, ["done"] * 4), ended.stderr
    missing = [rank for block in reports(ended) for line in block[2:] for rank in re.findall(r"missing: rank (\d)", line)]
    assert set(missing) <= {"1", "3"}, ended.stderr


def test_the_rank_is_named_that_others_wait_for_which_are_missed_themselves(job):
    """Rank 0 waits in its row for rank 2, which waits in its column for rank 1."""
    made = "row, column = (mpistrat.Communicator(comm.Split(*one)) for one in [(comm.rank == 1, 0), (comm.rank == 0, 0)])"
    after = "comm.rank and column.barrier(); comm.rank != 1 and row.barrier(); print('done')"
    ended = job(3, program("time.sleep(2.5)", made, after, seconds=30), MPISTRAT_STALL_SECONDS="1")
    assert (ended.code, ended.stdout.split()) == (0, ["done"] * 3), ended.stderr
    missed = {(block[0].split()[2], rank) for block in reports(ended) for rank in re.findall(r"missing: rank (\d)", str(block))}
    assert missed == {("0", "2"), ("2", "1")}, ended.stderr


def test_ranks_that_have_ended_tell_whom_mpi_waits_for(job):
    # of two reports the second would come after 2 s
    ended = job(2, program("time.sleep(1.7)", after="", seconds=30), MPISTRAT_STALL_SECONDS="1")
    assert ended.code == 0, ended.stderr
    assert len(re.findall(r"mpistrat: the program of rank 0 \(.*\) has ended \d\.\d s ago", ended.stderr)) == 1
    assert re.search(rf"  not ended: rank 1 \({HOST}, pid \d+\): alive; .*; now at .*job\.py:\d+ \(odd\)", ended.stderr)


def test_ranks_that_wait_for_each_other_end_with_the_reason(job):
    ended = job(2, program(MAKE, seconds=30))
    ended.check(1)
    told = [line for line in ended.marked if "AgreementError: ranks made different calls (they wait for each other):" in line]
    assert told, ended.stderr
    assert re.search(r"rank 0: collective \d+ of communicator \d+, all_reduce\(.*job\.py:\d+ \(step\)", ended.stderr)
    assert re.search(r"rank 1: collective \d+ of communicator 0, MultiWorkerMirroredStrategy at .*\(odd\)", ended.stderr)
    assert re.search(r'\[rank \d on .*\]   File ".*job\.py", line \d+, in (odd|step)', ended.stderr)


@pytest.mark.parametrize("made", ["", "own = mpistrat.Communicator(second)"], ids=["made beside", "made before"])
def test_threads_with_a_communicator_each_may_come_in_any_order(job, made):
    """On each rank one thread waits for the other rank, where another thread comes later."""
    before = f"""
    first, second = mpistrat.Communicator(comm.Split(0)), comm.Split(0)
    {made}
    def beside():
        comm.rank == 1 and time.sleep(4)
        {"own = mpistrat.Communicator(second)" if not made else "pass"}
        own.barrier()
    """.strip()
    after = "thread = threading.Thread(target=beside); thread.start(); comm.rank == 0 and time.sleep(4)"
    after += "; first.barrier(); thread.join(); print('done')"
    ended = job(2, program("pass", before, after, seconds=30))
    assert (ended.code, ended.stdout.split()) == (0, ["done"] * 2), ended.stderr


def test_a_rank_that_ends_while_others_wait_ends_the_job(job):
    ended = job(2, program("sys.exit()", seconds=30))
    ended.check(1)
    assert re.search(r"\[rank 0 on .*UnavailableError: rank 1 will not come to a collective that others wait in:", ended.stderr)
    assert f"rank 1 ({HOST}): its program has ended; last collective " in ended.stderr


def test_a_rank_of_a_communicator_of_some_ranks_that_has_ended_is_found_too(job):
    """Where no communicator is of all ranks, nobody waits at the end: the record stays until all have ended."""
    made = "part = mpistrat.Communicator(comm.Split(comm.rank % 2)); part.barrier()"
    after = "time.sleep(1); part.barrier()"
    ended = job(4, program("sys.exit()", made, after, seconds=30))
    ended.check(1)
    assert re.search(r"\[rank 3 on .*UnavailableError: rank 1 will not come to a collective that others wait in:", ended.stderr)
    assert f"rank 1 ({HOST}): its program has ended; last collective " in ended.stderr


def test_without_abort_every_rank_that_waits_raises_and_ends(job):
    ended = job(3, program("sys.exit()", seconds=30), MPISTRAT_ABORT="0")
    ended.check(1)
    assert ended.stderr.count("UnavailableError: rank 1 will not come") == 2


@pytest.mark.parametrize("end", ["pass", "from mpi4py import MPI; MPI.Finalize()"], ids=["by itself", "by the program"])
def test_a_job_that_ends_well_writes_the_trace_of_all_ranks_and_leaves_nothing_else(job, end):
    after = f"strategy.run(step); from mpistrat.watch.recorder import recorder as of; print(p := of().path, p.exists()); {end}"
    ended = job(2, program("time.sleep(0.2)", after=after, seconds=30), MPISTRAT_TIMELINE="trace.json")
    found = [line.split() for line in ended.stdout.splitlines()]
    assert (ended.code, [exists for _, exists in found]) == (0, ["True"] * 2), ended.stderr
    assert not any(Path(path).parent.exists() for path, _ in found)
    rows = json.loads((job.folder / "trace.json").read_text())["traceEvents"]
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {"rank 0", "rank 1"}
    calls = [row for row in rows if row["ph"] == "X" and row["name"].startswith("all_reduce(SUM")]
    assert {row["pid"] for row in calls} == {0, 1}
    assert max(row["dur"] for row in calls if row["pid"] == 0) > 0.15e6, "rank 1 comes 0.2 s late"


def test_ranks_that_never_meet_write_a_trace_each(job):
    made = "part = mpistrat.Communicator(comm.Split(comm.rank)); part.all_reduce('sum', [np.ones(3)])"
    assert job(2, program("pass", made, "pass", seconds=30), MPISTRAT_TIMELINE="trace.json").code == 0
    for rank, name in enumerate(["trace.json", "trace-1.json"]):
        rows = json.loads((job.folder / name).read_text())["traceEvents"]
        assert {row["pid"] for row in rows if row["ph"] == "X"} == {rank}


def test_one_rank_alone_has_no_thread(job):
    assert job(1, f"{MAKE}; sys.exit(threading.active_count() - 1)").code == 0


def test_a_variable_that_is_misspelt_and_a_trace_that_cannot_be_written_are_told_once(job):
    after = f"{MAKE}; mpistrat.MultiWorkerMirroredStrategy()"
    variables = {"MPISTRAT_STALL_SECOND": "7", "MPISTRAT_WEATHER": "fine", "MPISTRAT_TIMELINE": "missing/trace.json"}
    ended = job(2, program("pass", "pass", after, seconds=30), **variables)
    assert (ended.code, ended.stderr.count("MPISTRAT_STALL_SECOND is set, but is not a setting")) == (0, 1), ended.stderr
    assert "MPISTRAT_WEATHER" not in ended.stderr
    assert ended.stderr.count("cannot be written: No such file or directory") == 1, ended.stderr


LARGE = """
    import gc

    def train():
        strategy = mpistrat.MultiWorkerMirroredStrategy()
        flat = mpistrat.experimental.CommunicationOptions(algorithm="flat")
        for _ in range(3):
            strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", np.ones(10_000), flat))
        return strategy

"""
BETWEEN_NODES = {"MPISTRAT_VIRTUAL_NODES": "2x1", "MPISTRAT_STRICT": "0", "MPISTRAT_STALL_SECONDS": "20"}


COLLECTED, CLOSED = "train()\n    if comm.rank == 0: gc.collect()", "kept = train()\n    kept.close()"


@pytest.mark.parametrize("then", [COLLECTED, CLOSED], ids=["collected on one rank", "closed"])
def test_what_is_compared_at_exit_does_not_depend_on_what_was_collected_or_closed(job, then):
    ended = job(2, f"{LARGE}    {then}\n", **BETWEEN_NODES)
    assert (ended.code, ended.stderr) == (0, "")


def test_a_rank_that_waits_for_its_comparison_at_exit_is_seen(job):
    planted = "    kept = train()\n    if comm.rank == 0: kept.extended.communicator._guard._present.unconfirmed = 0\n"
    ended = job(2, LARGE + planted, **BETWEEN_NODES)
    ended.check(1)
    assert "UnavailableError: rank 0 will not come to a collective that others wait in" in ended.stderr
    assert ", confirm()" in ended.stderr


@pytest.mark.parametrize("strict", "01")
def test_what_was_started_behind_a_difference_is_waited_for_by_nobody(job, strict):
    program = """
        made = mpistrat.Communicator(comm)
        try:
            if comm.rank == 1:
                [work.wait() for work in [made.start_all_reduce("sum", np.ones(5)) for _ in range(2)]]
            else:
                made.all_reduce("sum", np.ones(7))
        except mpistrat.errors.AgreementError:
            print(mpistrat.Communicator(comm).all_reduce("sum", np.ones(1)))
            if comm.rank == 0:
                try:
                    made.barrier()
                except mpistrat.errors.UnavailableError as error:
                    assert "rank 1 makes no collective after collective 1, start_all_reduce" in str(error), error
    """
    ended = job(2, program, MPISTRAT_STRICT=strict, MPISTRAT_STALL_SECONDS="20")
    assert (ended.code, ended.stdout, ended.stderr) == (0, "[2.]\n[2.]\n", "")


@pytest.mark.parametrize("wait", [".wait()", ""], ids=["in wait", "at exit"])
def test_a_rank_that_waits_for_what_it_has_started_is_told_who_has_ended(job, wait):
    program = f"""
        made = mpistrat.Communicator(comm)
        if comm.rank == 1:
            made.start_all_reduce("sum", np.ones(5)){wait}
    """
    ended = job(2, program, MPISTRAT_STALL_SECONDS="20")
    ended.check(1)
    assert "UnavailableError: rank 0 will not come to a collective that others wait in" in ended.stderr
