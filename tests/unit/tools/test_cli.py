"""The words of commands: which are refused, and that -n and --nodes of bench and tune start ranks only outside of a job."""

import shlex

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch import environment
from mpistrat.tools import bench, cli, run


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Give the jobs that would be started, and let no measurement begin."""
    jobs = []
    monkeypatch.setattr(run, "start", lambda program, ranks, nodes: jobs.append((program, ranks, nodes)) or 7)
    monkeypatch.setattr(run, "follow", lambda *job: pytest.fail(f"started {job}"))
    monkeypatch.setattr(bench, "start", lambda: pytest.fail("started MPI"))
    return jobs


@pytest.fixture
def inside(monkeypatch):
    """Make this process a rank of a job of that size."""
    return lambda size: monkeypatch.setattr(environment, "detect", lambda: environment.LauncherView("srun", 1, size))


@pytest.mark.parametrize(
    ("words", "ranks", "nodes"),
    [
        (["bench", "all_reduce", "-n", "4", "--max-bytes", "1KiB"], 4, ""),
        (["bench", "all_reduce", "--nodes", "2+1"], 3, "2+1"),
        (["tune", "-np", "4", "--nodes", "2x2"], 4, "2x2"),
        (["tune", "--ranks=2"], 2, ""),
    ],
)
def test_outside_of_a_job_the_same_command_runs_on_ranks_of_its_own(started, words, ranks, nodes):
    assert cli.main(words) == 7
    assert started == [(["-m", "mpistrat", *words], ranks, nodes)]


MISSING = "the program is missing: a script, or -m and a module, after the options"
NO_TIME = "is not a duration: seconds, a number with s, m, h or d (10m), M:SS, H:MM:SS, D-HH and D-HH:MM:SS up to 9999d are"
NO_SIZE = "is not a size: a number and B, KiB"
SHAPES = "accepted are NODESxRANKS (2x4), ranks per node joined by + (3+1), each with :block or :cyclic behind it"
NO_SIZES = "cannot be measured: accepted are multiples of 4 bytes, --min-bytes not above --max-bytes"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run train.py", "the number of ranks is missing: -n N, or --nodes SHAPE for virtual nodes"),
        ("run -n2 --timeout '10 minutes' train.py", f"--timeout '10 minutes' {NO_TIME}"),
        ("run -n2 --timeout 0 train.py", "--timeout 0 would end the job at once; without --timeout it has no limit"),
        ("run -n2 --restart-delay soon train.py", f"--restart-delay 'soon' {NO_TIME}"),
        ("run -n2 --max-restarts -1 train.py", "--max-restarts -1 is negative"),
        ("run -n2 --timeout 1e30 train.py", f"--timeout '1e30' {NO_TIME}"),
        ("run -n2 --max-restarts 1 --restart-delay 1e30 train.py", f"--restart-delay '1e30' {NO_TIME}"),
        ("run -n2 --hostfile hosts train.py", "--hostfile hosts is no file; accepted is one with a line for each host"),
        ("run -n2 --hostfile . train.py", "--hostfile . is no file; accepted is one"),
        ("run -n 0 train.py", "-n 0: a job has from 1 to 1048576 ranks"),
        ("run -n 99999999999 train.py", "-n 99999999999: a job has from 1 to 1048576 ranks"),
        ("run -n 2 ''", MISSING),
        ("run -n 2 -m ''", MISSING),
        ("run -n 2 -- -m", MISSING),
        ("run -n 2 .", "there is no script '.' in {cwd}"),
        ("run -n 2", MISSING),
        ("run -n 2 --", MISSING),
        ("run -n 2 -m trian.steps", "there is no module 'trian' in {cwd}, nor is one installed"),
        ("run -n 2 trian.py", "there is no script 'trian.py' in {cwd}"),
        ("run -n 4 --nodes 2x3 train.py", f"node shape '2x3' describes 6 ranks, but there are 4; {SHAPES}"),
        ("run -n 4 --nodes 2by2 train.py", f"node shape '2by2' is malformed; {SHAPES}"),
        ("tune -n 0", "-n 0: a job has from 1 to 1048576 ranks"),
        ("tune --max-bytes lots", f"'lots' {NO_SIZE}"),
        ("tune -n 2 --max-bytes 8", "--max-bytes 8 is too small: accepted are sizes of at least"),
        ("bench all_reduce -n 4 --nodes 2x3", "node shape '2x3' describes 6 ranks, but"),
        ("bench all_reduce --max-bytes lots", f"'lots' {NO_SIZE}"),
        ("bench all_reduce --min-bytes 6", f"sizes from 6 to 67108864 bytes {NO_SIZES}"),
        ("bench all_reduce --min-bytes 1KiB --max-bytes 8", f"sizes from 1024 to 8 bytes {NO_SIZES}"),
        ("demo --ranks 4 --nodes 2x3", f"node shape '2x3' describes 6 ranks, but there are 4; {SHAPES}"),
        ("demo --nodes two", f"node shape 'two' is malformed; {SHAPES}"),
        ("demo --ranks 0", "--ranks must be at least 1; got 0"),
        ("demo --epochs 0", "--epochs must be at least 1; got 0"),
        ("demo --out train.py/folder", "--out train.py/folder cannot be created as a folder: Not a directory"),
        ("demo --out . --checkpoint train.py", "--checkpoint train.py cannot be created as a folder: File exists"),
        ("plan --bytes 8 --world 2y2", "node shape '2y2' is malformed; accepted are NODESxRANKS"),
        ("plan --bytes 8 --world 0x2", "node shape '0x2' has a node without ranks or no nodes"),
        ("plan --world 2x2 --bytes lots", f"'lots' {NO_SIZE}"),
        ("plan --world 2x2 --bytes 10", "10 bytes are not a whole number of float32 elements; --bytes must be a multiple"),
        ("plan --world 2x2 --bytes 1e30", "--bytes 1e30 are too many: up to 1024 GiB are accepted"),
    ],
)
def test_bad_words_start_nothing(started, monkeypatch, tmp_path, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert cli.main(shlex.split(words)) == 2
    out, err = capsys.readouterr()
    assert (out, started, [path.name for path in tmp_path.iterdir()]) == ("", [], ["train.py"])
    assert err.startswith(f"mpistrat {words.split()[0]}: {message.format(cwd=tmp_path)}")


@pytest.mark.parametrize("words", ["--dtype object", "--dtype ,", "--algorithm best"])
def test_a_plan_has_one_of_the_known_dtypes_and_algorithms(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "--world", "2x2", "--bytes", "8", *words.split()])
    name, value = words.split()
    assert f"argument {name}: invalid choice: '{value}' (choose from " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["bench", "all_reduce"], ["tune"]], ids=["bench", "tune"])
def test_a_rank_of_another_job_refuses(inside, words, started, capsys):
    inside(8)
    assert cli.main([*words, "-n", "4"]) == 2
    said = ": 4 ranks are asked for inside a job of 8, which srun has started: leave out -n and --nodes there\n"
    assert capsys.readouterr().err.endswith(said)
    assert cli.main([*words, "--nodes", "4x2"]) == 2
    said = ": --nodes 4x2 in a job: set MPISTRAT_VIRTUAL_NODES before it starts\n"
    assert capsys.readouterr().err.endswith(said)
    assert started == []


def test_what_all_ranks_refuse_together_is_a_line_too(monkeypatch, capsys):
    error = LaunchError("planted")
    error.raised_everywhere = True
    monkeypatch.setattr(bench, "start", lambda: (_ for _ in ()).throw(error))
    assert cli.main(["tune"]) == 2
    assert capsys.readouterr().err == "mpistrat tune: planted\n"


def test_the_ranks_of_the_job_that_was_asked_for_measure(inside, monkeypatch, started):
    inside(4)
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", "2x2")
    begun = []

    def begin():
        begun.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "start", begin)
    for words in (["-n", "4"], ["--nodes", "2x2"], []):
        assert cli.main(["tune", *words]) == 130
    assert (begun, started) == ([True] * 3, [])
