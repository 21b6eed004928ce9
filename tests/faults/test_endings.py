"""Exceptions, exits, killed launchers, forks and subprocesses: what ends, what does not, with which code, and what is told."""

import socket
from pathlib import Path

import pytest

from tests.faults.jobs import LIMIT_SECONDS, PYTHON
from tests.processes import codes_after_loss, until

QUIET_FORK = {"OMPI_MCA_mpi_warn_on_fork": "0"}

HOST = socket.gethostname()
RUNNER = (*PYTHON, "-m", "mpi4py")  # what mpistrat run puts before a script

ON_RANK_1 = """
    from sys import exit as leave
    if comm.rank == 1:
        note_fault()
        {fault}
    mine.Barrier()
"""


@pytest.mark.parametrize("python", [PYTHON, RUNNER], ids=["python", "python -m mpi4py"])
def test_exception_ends_the_job_with_one_traceback(job, python):
    ended = job(2, ON_RANK_1.format(fault="raise ValueError('a bad batch\\nin two lines')"), python)
    ended.check(1)
    # from the script on: no frame of a runner, and every line says whose it is
    assert ended.marked[0] == f"[rank 1 on {HOST}] Traceback (most recent call last):"
    assert 'job.py", line ' in ended.marked[1]
    assert ended.marked[-2:] == [f"[rank 1 on {HOST}] ValueError: a bad batch", f"[rank 1 on {HOST}] in two lines"]
    assert ended.stderr.count("Traceback") == 1


ON_EVERY_RANK = """
    from mpistrat.errors import AgreementError
    note_fault()
    {fault}
"""
# what fails, whose the one traceback is, and how its last line begins
FAILURES = {
    "on another thread": (
        ON_RANK_1.format(fault="threading.Thread(target=lambda: 1 // 0, name='loader').start(); mine.recv(source=0)"),
        f"rank 1 on {HOST}, thread loader",
        "ZeroDivisionError: ",
    ),
    "on every rank": (ON_EVERY_RANK.format(fault="raise KeyError('weights')"), f"rank 0 on {HOST}", "KeyError: 'weights'"),
    "raised everywhere, late on rank 0": (
        ON_EVERY_RANK.format(fault="time.sleep(1.2 if comm.rank == 0 else 0); raise AgreementError('different dtypes')"),
        f"rank 0 on {HOST}",
        "mpistrat.errors.AgreementError: different dtypes",
    ),
    "raised everywhere, but for rank 0": (
        ON_RANK_1.format(fault="from mpistrat.errors import AgreementError; raise AgreementError('alone')"),
        f"rank 1 on {HOST}",
        "mpistrat.errors.AgreementError: alone",
    ),
    "of another rank": (
        ON_EVERY_RANK.format(
            fault="""error = AgreementError("another rank has failed")
    error.failed_ranks = (1,)
    raise error if comm.rank == 0 else ValueError("a bad file")"""
        ),
        f"rank 1 on {HOST}",
        "ValueError: a bad file",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_told_once_by_the_rank_that_it_is_of(job, failure):
    text, whose, told = FAILURES[failure]
    ended = job(2, text)
    ended.check(1)
    assert ended.marked[0] == f"[{whose}] Traceback (most recent call last):"
    assert ended.marked[-1].startswith(f"[{whose}] {told}")
    assert ended.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        ("os._exit(7)", codes_after_loss(7)),
        ("os.kill(os.getpid(), signal.SIGKILL)", codes_after_loss(137)),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(1000)", {143, 15}),  # Open MPI's, MPICH's
    ],
    ids=["_exit", "SIGKILL", "SIGTERM"],
)
def test_rank_that_vanishes_ends_the_job(job, fault, codes):
    job(2, ON_RANK_1.format(fault=fault)).check(*codes)


@pytest.mark.parametrize(("num_ranks", "abort"), [(2, "0"), (1, "1")], ids=["switched off", "one rank alone"])
def test_where_no_other_rank_is_to_be_ended_the_hooks_are_those_of_python(job, num_ranks, abort):
    program = "sys.exit(sys.excepthook is not sys.__excepthook__ or threading.excepthook is not threading.__excepthook__)"
    assert job(num_ranks, program, RUNNER, MPISTRAT_ABORT=abort).code == 0


@pytest.mark.parametrize(
    ("fault", "code", "python"),
    [
        ("sys.exit(3)", 3, PYTHON),
        ("leave(4)", 4, PYTHON),
        ("raise SystemExit(5)", 5, RUNNER),
        ("exit(6)", 6, PYTHON),
        ("sys.exit('no such file')", 1, RUNNER),
        ("threading.Thread(target=sys.exit, args=(7,)).start(); time.sleep(1000)", 7, PYTHON),
    ],
)
def test_an_exit_of_one_rank_ends_the_job_with_its_code(job, fault, code, python):
    ended = job(2, ON_RANK_1.format(fault=fault), python)
    ended.check(code)
    assert "Traceback" not in ended.stderr


def test_an_exit_of_one_rank_runs_its_exit_handlers_and_prints_all_that_was_printed(job):
    program = """
        atexit.register(lambda: print("saved"))
        print("x" * 100_000)
        sys.exit(3 if comm.rank else 0)
    """
    ended = job(2, program)
    assert (ended.code, ended.stdout.count("saved")) == (3, 2)
    assert ended.stdout.count("x") == 200_000


def test_exits_that_say_nothing_is_wrong_end_normally(job):
    program = """
        try:
            sys.exit(4)
        except SystemExit as caught:
            assert (caught.code, repr(caught)) == (4, "SystemExit(4)")
        try:
            raise ValueError("handled")
        except ValueError:
            pass
        for arguments in ((), (0,)):
            thread = threading.Thread(target=sys.exit, args=arguments)
            thread.start(), thread.join()
        mine.Barrier()
        if comm.rank == 0:
            sys.exit()
        if comm.rank == 1:
            sys.exit(0)
        if comm.rank == 2:
            raise SystemExit
        sys.exit(False)
    """
    ended = job(4, program)
    assert (ended.code, ended.stderr) == (0, "")


def test_ranks_that_hold_different_shared_windows_end(job):
    # Open MPI frees windows in the order of their handles, and those of closed communicators are used again
    program = """
        from mpistrat import ending

        def call_late():
            try:
                last.all_reduce("sum", np.ones(4))
            except mpistrat.errors.UnavailableError as error:
                print("the programs of all ranks have ended" in str(error))

        ending.at(ending.Stage.CLOSE, call_late)  # as exit handlers that were registered before
        half = mpistrat.Communicator(comm.Split(comm.rank % 2))
        whole = mpistrat.Communicator(comm)
        if comm.rank % 2:
            half.close()
        last = mpistrat.Communicator(comm)
        note_fault()
    """
    ended = job(4, program)
    assert (ended.code, ended.stderr, ended.stdout) == (0, "", "True\n" * 4)


def test_exit_handlers_may_be_calls_themselves(job):
    # then no Python frame is beneath the call, from which a line of the program could be taken
    program = """
        from mpistrat.mpi4py import wrap

        mpi, communicator = wrap(comm), mpistrat.Communicator(comm)
        passed, sums = np.zeros(4), np.zeros(4)
        for _ in range(2):
            mpi.Allreduce(np.ones(4), passed)
            communicator.all_reduce("sum", np.ones(4), out=sums)
        passed[:], sums[:] = 0, 0
        atexit.register(lambda: print(passed.sum(), sums.sum()))
        atexit.register(communicator.barrier)
        atexit.register(mpi.Allreduce, np.ones(4), passed)
        atexit.register(communicator.all_reduce, "sum", np.ones(4), out=sums)
    """
    ended = job(2, program)
    assert (ended.code, ended.stderr, ended.stdout) == (0, "", "8.0 8.0\n" * 2)


@pytest.mark.parametrize("ranks", ["01", "1"], ids=["on all ranks", "on one rank"])
def test_ctrl_c_is_one_line(job, ranks):
    fault = f"if str(comm.rank) in {ranks!r}: note_fault(); signal.raise_signal(signal.SIGINT); time.sleep(1000)"
    ended = job(2, f"mine.Barrier()\n{fault}\nmine.Barrier()")
    ended.check(130)
    assert [line.partition("] ")[2] for line in ended.marked] == ["interrupted"]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "sh"]], ids=["", "in a shell"])
def test_where_the_launcher_is_killed_the_ranks_end(job, wrapper):
    # each rank is ended for itself, whatever it does
    program = """
        import re
        segments = re.findall(r"/dev/shm/sm_segment.*", Path("/proc/self/maps").read_text())
        if comm.rank == 0:
            Path("starting").write_text("\\n".join(segments))
            Path("starting").rename("up")
            time.sleep(1000)
        while comm.rank == 1:
            pass
        mine.Recv(bytearray(1), source=0)
    """

    def kill(launcher):
        assert until((job.folder / "up").exists, LIMIT_SECONDS)
        launcher.kill()

    assert not job(3, program, (*wrapper, *PYTHON), meanwhile=kill).leftovers
    assert not any(Path(segment).exists() for segment in (job.folder / "up").read_text().split())


def test_what_is_called_after_mpi_finalize_raises(job):
    program = """
        from mpi4py import MPI

        strategy = mpistrat.MultiWorkerMirroredStrategy()
        ops = strategy.communicator
        for _ in range(2):
            ops.all_reduce("sum", np.ones(3))
        MPI.Finalize()
        sums = [lambda: ops.all_reduce("sum", np.ones(3)), lambda: ops.start_all_reduce("sum", np.ones(3))]
        makes = [mpistrat.MultiWorkerMirroredStrategy, lambda: mpistrat.Communicator(MPI.COMM_WORLD)]
        for call in [*sums, lambda: ops.all_gather(np.ones(3)), ops.barrier, *makes]:
            try:
                call()
            except (mpistrat.errors.UnavailableError, mpistrat.errors.LaunchError) as error:
                print(f"told of it: {error}", flush=True)
        strategy.close()
        Path(f"told-{strategy.rank}").touch()
        while not (Path("told-0").exists() and Path("told-1").exists()):  # the first that ends with code 1 ends the other
            time.sleep(0.01)
        raise ValueError("a bad end")
    """
    ended = job(2, program)
    assert (ended.code, ended.stdout.count("told of it:")) == (1, 12), ended
    assert "ValueError: a bad end" in ended.stderr
    assert "called after MPI_FINALIZE" not in ended.stderr
    assert ended.stdout.count("the program has called MPI_Finalize") == 8
    assert ended.stdout.count("MPI was finalized already") == 4


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_forked_children_end_alone(job, num_ranks):
    program = """
        pid = os.getpid()
        atexit.register(lambda: print("the rank's handler" if os.getpid() == pid else "no child's business"))
        communicator = mpistrat.Communicator(comm)
        for end, code in (("sys.exit(7)", 7), ("sys.exit()", 0), ("1 // 0", 1), ("os.kill(os.getpid(), 9)", -9)):
            if not (child := os.fork()):
                atexit.register(lambda: print("the child's handler"))
                try:
                    communicator.all_reduce("sum", np.ones(3))
                except mpistrat.errors.UnavailableError as error:
                    print(error if f"process {os.getpid()} was forked from rank {comm.rank}" in str(error) else "", flush=True)
                for make in (lambda: mpistrat.MultiWorkerMirroredStrategy().communicator, lambda: mpistrat.Communicator(comm)):
                    try:
                        print("a child's own", make().all_reduce("sum", np.ones(3)), flush=True)
                    except mpistrat.errors.LaunchError as error:
                        print(error, flush=True)
                exec(end)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, end
            time.sleep(0.2)
            mine.Barrier()
            total = mine.allreduce(1)
            assert total == comm.size, total
            assert (communicator.all_reduce("sum", np.ones(3)) == comm.size).all()
    """
    ended = job(num_ranks, program, **QUIET_FORK)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("the rank's handler") == num_ranks
    assert "no child's business" not in ended.stdout
    assert ended.stdout.count("the child's handler") == 3 * num_ranks
    assert ended.stdout.count("and is not a rank itself") == 4 * num_ranks
    assert ended.stdout.count("was forked from a rank, and is no rank;") == (0 if num_ranks == 1 else 8 * num_ranks)
    assert ended.stdout.count("a child's own [1. 1. 1.]") == (8 if num_ranks == 1 else 0)  # as in a pool of processes


INNER = """
import os
{before}
from mpistrat.launch.bootstrap import start
from mpistrat.launch.environment import detect
comm = start()
print("inner", comm.allreduce(1), detect() is None, os.environ.get("MPISTRAT_VIRTUAL_NODES"))
print("shared" if "/sm_segment" in open("/proc/self/maps").read() else "nothing shared")
"""


def test_a_program_that_a_rank_starts_is_not_a_rank_and_is_refused_if_it_starts_mpi_first(job):
    before = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    program = f"""
        import subprocess
        Path(f"inner{{comm.rank}}.py").write_text({INNER.format(before="")!r})
        Path(f"first{{comm.rank}}.py").write_text({INNER.format(before=before)!r})
        for shell, name in ((), "inner"), (("sh", "-c", '"$@"; true', "sh"), "inner"), ((), "first"):
            argv = [*shell, sys.executable, f"{{name}}{{comm.rank}}.py"]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
            print(done.stdout, done.stderr)
        mine.Barrier()
    """
    ended = job(2, program, MPISTRAT_VIRTUAL_NODES="1+1")
    assert ended.code == 0, ended.stderr
    # MPI starts as in a process alone: that of a rank would leave 16 MiB in /dev/shm
    assert ended.stdout.count("inner 1 True None\nnothing shared\n") == 4, ended.stdout
    assert ended.stdout.count("whose launcher's variables it has inherited; it is not a rank, and computes alone.") == 4
    assert ended.stdout.count("LaunchError: process ") == 2, ended.stdout


def test_a_job_that_a_rank_starts_is_a_job_of_its_own(job):
    program = f"""
        if comm.rank == 0:
            import subprocess
            from mpistrat.launch.mpiexec import command
            Path("inner.py").write_text({INNER.format(before="")!r})
            argv, extra = command(2, [sys.executable, "inner.py"])
            # mpiexec takes this variable from its ranks, and what killed jobs have left in /tmp must not meet the inner one
            extra["PRTE_MCA_prte_tmpdir_base"] = os.getcwd()
            done = subprocess.run(argv, capture_output=True, text=True, timeout=100, env={{**os.environ, **extra}})
            print(done.returncode, done.stdout, done.stderr)
            run = [sys.executable, "-m", "mpistrat", "run", "-n", "2", "inner.py"]
            print(subprocess.run(run, capture_output=True, text=True, timeout=100).stderr)
        mine.Barrier()
    """
    ended = job(2, program)
    assert ended.stdout.count("inner 2 False None") == 2, ended.stdout + ended.stderr
    assert "this is rank 0 of 2 that " in ended.stdout


STARTED = """
    from mpistrat.communicator.options import CommunicationOptions
    strategy = mpistrat.MultiWorkerMirroredStrategy()

    def start_sum():
        return mpistrat.get_replica_context().start_all_reduce("sum", np.ones(3), CommunicationOptions(timeout_seconds=0.3))

    def meet():
        mpistrat.get_replica_context().barrier()

    if comm.rank == 0:
        handle = strategy.run(start_sum)
        note_fault()
        {then}
    else:
        time.sleep(1)
"""


@pytest.mark.parametrize(
    ("then", "abort"), [("pass", "0"), ("pass", "1"), ("strategy.close()", "1"), ("strategy.run(meet)", "1")]
)
def test_a_failure_that_nobody_waits_for_is_told(job, then, abort):
    ended = job(2, STARTED.format(then=then), MPISTRAT_ABORT=abort)
    assert ended.code == 1
    if abort == "1":
        ended.check(1)
        assert "DeadlineExceededError: rank 0 " in ended.marked[-1]
        assert ended.stderr.count("Traceback") == 1
    assert "DeadlineExceededError: rank 0 " in ended.stderr


def test_a_failure_that_was_raised_is_not_raised_again(job):
    caught = """
    if comm.rank == 0:
        try:
            strategy.experimental_local_results(handle)[0].wait()
            print("unexpected")
        except mpistrat.errors.DeadlineExceededError:
            strategy.close()
            print("closed")
    """
    ended = job(2, STARTED.format(then="pass") + caught)
    assert (ended.stdout, ended.code) == ("closed\n", 0), ended.stderr


@pytest.mark.parametrize("nodes", ["1x3", "2+1", "1+1+1"])
@pytest.mark.parametrize(
    "then",
    ["pass", "strategy.close()", "other = mpistrat.MultiWorkerMirroredStrategy(); strategy.close(); other.close()"],
    ids=["ends", "closes the strategy", "makes another one"],
)
def test_a_program_that_has_handled_a_call_which_one_rank_cannot_make_goes_on(job, then, nodes):
    program = f"""
        strategy = mpistrat.MultiWorkerMirroredStrategy()
        reduce = lambda array: strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", array))
        reduce(np.ones(40_001, np.float32))  # between nodes this is compared later
        try:
            reduce(np.ones(2, "f8" if comm.rank else ">f8"))
        except mpistrat.errors.MpistratError as error:
            print(type(error).__name__)
        {then}
    """
    ended = job(3, program, MPISTRAT_VIRTUAL_NODES=nodes, MPISTRAT_STRICT="0")
    assert ended.code == 0, ended
    assert sorted(ended.stdout.split()) == ["AgreementError", "AgreementError", "UnsupportedDtypeError"]


def test_a_signal_that_interrupts_the_beginning_or_end_of_a_call_is_told_to_all(job):
    program = """
        def trace(frame, event, argument):
            if frame.f_code.co_name == where and frame.f_code.co_filename.endswith("guard.py"):
                if where == "__exit__":
                    sys.settrace(None)
                    raise KeyboardInterrupt
                return interrupt

        def interrupt(frame, event, argument):
            if not communicator._guard.thread._free:  # it is in a call
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        for where in ("acquire", "__enter__", "__exit__"):
            communicator = mpistrat.Communicator(comm)
            communicator.barrier()
            if comm.rank == 0:
                sys.settrace(trace)
                try:
                    communicator.barrier()
                except KeyboardInterrupt:
                    pass
            if where != "__exit__":  # which comes when the other rank has taken part
                mine.Barrier()
            try:
                for _ in range(2):
                    communicator.barrier()
            except mpistrat.errors.UnavailableError as error:
                print(where, comm.rank, "InterruptedError" in str(error), flush=True)
            mine.Barrier()
    """
    ended = job(2, program)
    told = [f"{where} {rank} True" for where in ("__enter__", "__exit__", "acquire") for rank in range(2)]
    assert (ended.code, sorted(ended.stdout.splitlines())) == (0, told), ended.stderr


@pytest.mark.parametrize("nodes", ["", "2+1"])
def test_a_daemon_may_be_in_a_collective_when_the_program_ends(job, nodes):
    program = """
        import contextlib
        communicator = mpistrat.Communicator(comm)
        half = mpistrat.Communicator(comm.Split(comm.rank == 2))  # whose window not all ranks have

        def reduce_for_ever():
            with contextlib.suppress(mpistrat.errors.UnavailableError):  # where it was between two calls, the next one raises
                while True:
                    communicator.all_reduce("sum", np.ones(2000))

        threading.Thread(target=reduce_for_ever, daemon=True).start()
        half.all_reduce("sum", np.ones(3))
        time.sleep(0.2)
    """
    ended = job(3, program, MPISTRAT_VIRTUAL_NODES=nodes)
    assert ended.code == 0, ended


def test_a_daemon_in_a_collective_ends_the_job_where_mpi_would_wait_for_ever(job):
    """MPI_Finalize of Open MPI frees windows in the order of their handles, and that of a closed communicator is used again."""
    program = """
        communicator = mpistrat.Communicator(comm)
        pairs = [comm.Create_group(comm.group.Incl([0, other])) if comm.rank in (0, other) else None for other in (1, 2)]
        closed, kept = (mpistrat.Communicator(pair) if pair else None for pair in pairs)
        if closed:
            closed.close()
        last = mpistrat.Communicator(comm)
        if comm.rank == 0:  # the others never come
            threading.Thread(target=communicator.all_reduce, args=("sum", np.ones(2000)), daemon=True).start()
            time.sleep(0.2)
    """
    ended = job(3, program)
    assert (ended.code, "a thread of some rank is in a collective" in ended.stderr) == (1, True), ended
