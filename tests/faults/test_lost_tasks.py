"""Jobs with parameter servers that survive the loss of ranks: workers, servers and chiefs that are killed at random instants.

``pytest tests/faults/test_lost_tasks.py --kills 50`` kills workers in 50 jobs, and a server in 10.
"""

import random

from tests.faults.jobs import with_servers
from tests.processes import patient

# A step reads and writes a vector that is sent in pieces, counts that it has run, and which example it has seen.
TRAINING = """
    STEPS, EXAMPLES = 100, 60
    with strategy.scope():
        weights, stamps = mpistrat.Variable(np.zeros(20_000)), mpistrat.Variable(np.zeros(20_000))
        runs, seen = mpistrat.Variable(np.zeros(100 * STEPS)), mpistrat.Variable(np.zeros(EXAMPLES))
    wanted = np.arange(20_000.0) % 7

    def examples(context):
        return itertools.cycle(range(context.input_pipeline_id, EXAMPLES, context.num_input_pipelines))

    def step(number, examples):
        found = stamps.numpy()
        assert (found == found[0]).all(), "half of an assignment was seen"
        stamps.assign(np.full(20_000, number))
        weights.assign_sub(0.2 * (weights.numpy() - wanted))
        seen.scatter_add(mpistrat.IndexedSlices(np.ones(1), [next(examples)]))
        runs.scatter_add(mpistrat.IndexedSlices(np.ones(1), [number]))
        return number

    data = iter(coordinator.create_per_worker_dataset(examples))
    killings = [kill_after(seconds, rank) for seconds, rank in KILLS]
    values = []
    while len(values) < STEPS or any(killing.is_alive() for killing in killings):
        values.append(coordinator.schedule(step, (len(values), data)))
    values += [coordinator.schedule(step, (len(values) + more, data)) for more in range(STEPS)]
    coordinator.join()
    assert coordinator.fetch(values) == list(range(len(values)))
    assert np.allclose(weights, wanted), np.abs(weights - wanted).max()
    assert (stamps.numpy() == stamps.numpy()[0]).all()
    count = runs.numpy()[: len(values)]
    assert count.min() >= 1, "a function has not run"
    assert count.sum() - len(values) <= len(killings), "more ran twice than lost workers had"
    assert seen.numpy().min() >= 1, "an example was not seen"
    assert seen.numpy().sum() >= count.sum()
    print("trained", len(values), int(count.sum()), flush=True)
"""

WITHOUT_A_SERVER = """
    with strategy.scope():
        lost, kept = mpistrat.Variable(np.zeros(20_000)), mpistrat.Variable(np.arange(20_000))

    def step():
        lost.assign_add(np.ones(20_000))

    def wait_for_the_end():
        try:
            while lost.numpy()[0] >= 0:
                pass
        except UnavailableError as error:
            print("the reader was told:", error, flush=True)
            raise

    assert not lost.numpy().any()
    values = [coordinator.schedule(wait_for_the_end)]
    killing = kill_after(SECONDS, 1)
    try:
        while True:
            values.append(coordinator.schedule(step))
    except UnavailableError as error:
        seconds = time.time() - float(Path("fault").read_text())
        print("unavailable", f"{seconds:.3f}", error, flush=True)
    assert {value.status.name for value in values} <= {"READY", "ABORTED"}
    try:
        values[-1].fetch()
    except (CancelledError, UnavailableError):
        pass
    fetch, schedule = (lambda: coordinator.fetch(values)), (lambda: coordinator.schedule(abs, (1,)))
    for call in (coordinator.join, coordinator.done, fetch, schedule, lost.numpy):
        try:
            call()
        except UnavailableError as error:
            assert "lost ps 0 (rank 1 on " in str(error), error
        else:
            raise AssertionError(f"{call} does not raise")
    assert (kept.numpy() == np.arange(20_000)).all(), "what the other server has can be read"
    strategy.close()
    print("closed", flush=True)
"""


# The only worker sends the first half of an assignment, and is gone.
HALF_OF_AN_ASSIGNMENT = """
    from mpistrat.parameter_server.client import current_client

    with strategy.scope():
        weights = mpistrat.Variable(np.zeros(20_000))

    def assign_half():
        channel = current_client(0).channel
        start = channel._start
        channel._start = lambda requests, send, messages: start(requests, send, messages[:2])
        weights.assign(np.ones(20_000))
        os.kill(os.getpid(), signal.SIGKILL)

    assert not weights.numpy().any()
    note_fault()
    coordinator.schedule(assign_half)
    try:
        coordinator.join()
    finally:
        print("left are", set(weights.numpy().tolist()), flush=True)
"""


def test_training_goes_on_without_workers_that_are_killed(job, worker_kill):
    instants = random.Random(worker_kill)
    kills = [(instants.uniform(0, 1), rank) for rank in instants.sample([2, 3, 4], 2 - worker_kill % 2)]
    ended = job(5, with_servers(TRAINING, KILLS=kills), survive=True)
    assert ended.code == 0, (kills, ended.stderr)
    assert "trained" in ended.stdout, (kills, ended.stderr)
    assert ended.stdout.count("served worker") == 3 - len(kills)
    for _, rank in kills:
        assert f"lost worker {rank - 2} (rank {rank} on " in ended.stderr
    assert not ended.leftovers


def test_a_server_that_is_killed_makes_the_rest_unavailable(job, server_kill):
    limit = patient(1.0)
    seconds = random.Random(server_kill).uniform(0, 1)
    way = ("auto", "mpi")[server_kill % 2]
    ended = job(5, with_servers(WITHOUT_A_SERVER, NUM_SERVERS=2, SECONDS=seconds), survive=True, MPISTRAT_INTRA_TRANSPORT=way)
    assert ended.code == 0, (seconds, ended.stderr)
    assert "closed" in ended.stdout
    [told] = [line.split() for line in ended.stdout.splitlines() if line.startswith("unavailable")]
    assert float(told[1]) < limit
    assert " ".join(told).split("lost ")[1].startswith("ps 0 (rank 1 on ")
    assert "the reader was told: worker " in ended.stdout
    assert (ended.stdout.count("served ps 1"), ended.stdout.count("served worker")) == (1, 2)
    assert not ended.leftovers


KILLS_A_SERVER = """
    with strategy.scope():
        lost, kept = mpistrat.Variable(np.zeros(20_000)), mpistrat.Variable(np.arange(20_000))
    assert not lost.numpy().any()
    kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    for call in (lambda: strategy.extended.update(lost, kill), lost.numpy, lost.numpy):
        try:
            call()
        except UnavailableError:
            assert (kept.numpy() == np.arange(20_000)).all()
            print("told", flush=True)
    strategy.close()
"""


def test_after_the_loss_of_a_server_each_answer_of_others_is_taken_once(job):
    ended = job(4, with_servers(KILLS_A_SERVER, NUM_SERVERS=2), survive=True)
    assert (ended.code, ended.stdout.count("told")) == (0, 3), ended.stderr


def test_a_chief_that_is_killed_ends_the_job_and_is_named(job):
    limit = patient(5.0)
    chief = "coordinator.schedule(time.sleep, (1000,))\nkill_after(0.5, 0)\ncoordinator.join()\n"
    ended = job(4, with_servers(chief), survive=True)
    ended.check(1)
    assert ended.seconds < limit
    assert "UnavailableError: ps 0 (rank 1 on " in ended.stderr
    assert ended.stderr.count("lost chief 0 (rank 0 on ") == 1


def test_the_exit_code_of_a_chief_that_fails_after_it_has_caught_a_loss_is_that_of_the_job(job):
    chief = """
    kill_after(0, 1).join()
    try:
        while True:
            coordinator.schedule(abs, (1,)).fetch()
    except (CancelledError, UnavailableError):
        sys.exit(3)
"""
    job(4, with_servers(chief, NUM_SERVERS=2), survive=True).check(3)


def test_without_workers_the_rest_is_unavailable_and_no_variable_has_half_a_change(job):
    ended = job(3, with_servers(HALF_OF_AN_ASSIGNMENT), survive=True, MPISTRAT_MAX_MESSAGE_BYTES="80000")
    ended.check(1)
    assert "left are {0.0}\n" in ended.stdout
    assert "UnavailableError: chief 0 (rank 0 on " in ended.stderr
    assert "lost worker 0 (rank 2 on " in ended.stderr
