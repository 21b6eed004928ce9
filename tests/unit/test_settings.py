"""What a program meets beside its calls: settings, exceptions, the logger, and the order of things at its end."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat import errors, settings
from mpistrat.execution.select import DEVICE_TRANSPORTS, TRANSPORTS
from mpistrat.logger import logger, warn_once
from mpistrat.settings import SETTINGS, parse_bytes
from tests.processes import python


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0", 0), ("8", 8), ("8B", 8), ("64MiB", 64 * 2**20), ("64 mib", 64 * 2**20), (" 1.5 KiB ", 1536), ("1KB", 1000)),
        *(("2MB", 2 * 10**6), ("1GB", 10**9), ("3GiB", 3 * 2**30), ("1e3", 1000)),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


# with a unit, or as SLURM writes them
DURATIONS = {"90": 90, "1.5": 1.5, "1.5s": 1.5, "10m": 600, " 2 h ": 7200, "1.5d": 129600, "1:30": 90, "2:00:00": 7200}
DURATIONS |= {"1-12": 129600, "1-12:30": 131400, "1-00:00:05": 86405}
NO_SIZE = "is not a size: a number and B, KiB, MiB, GiB, KB, MB or GB are accepted, for example 64MiB"
NO_DURATION = "seconds, a number with s, m, h or d (10m), M:SS, H:MM:SS, D-HH and D-HH:MM:SS up to 9999d are accepted"
NOT_WHOLE = "is not a whole, non-negative number of bytes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, NO_SIZE) for text in ("", "MiB", "1TiB", "1.2.3MiB", "lots", "nan", "inf", "0x10", "1e400", "1 MiB 2")),
        *((text, NOT_WHOLE) for text in ("-1", "0.5", "1.0001KiB", "-64MiB")),
    ],
)
def test_what_is_not_a_size_says_what_is(text, message):
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


@given(st.integers(0, 2**50), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "KB", "MB", "GB"]))
def test_whole_numbers_are_exact(number, unit):
    factor = parse_bytes(f"1{unit}")
    assert parse_bytes(f"{number % 2**20} {unit}") == number % 2**20 * factor
    assert parse_bytes(str(number)) == number


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_has_a_name_of_its_own_a_meaning_and_a_default(setting):
    assert [other.name for other in SETTINGS].count(setting.name) == 1
    assert setting.name.startswith("MPISTRAT_")
    assert setting.meaning.endswith(".")
    for environ in ({}, {setting.name: ""}, {setting.name: "  "}):
        assert setting.read(environ) == setting.default


@pytest.mark.parametrize(
    ("setting", "text", "expected"),
    [
        (settings.STRICT, "1", True),
        (settings.STRICT, " On ", True),
        (settings.STRICT, "no", False),
        (settings.ABORT, "FALSE", False),
        (settings.ALGORITHM, "Hierarchical", "hierarchical"),
        (settings.CHUNK_BYTES, "1MiB", 2**20),
        (settings.MAX_MESSAGE_BYTES, "1GB", 10**9),
        (settings.INTRA_TRANSPORT, "mpi", "mpi"),
        (settings.INTER_TRANSPORT, "MPI_RING", "mpi_ring"),
        (settings.TIMEOUT_SECONDS, "2.5", 2.5),
        (settings.TIMEOUT_SECONDS, "0", 0.0),
        (settings.VIRTUAL_NODES, "2x2:cyclic", "2x2:cyclic"),
        *((settings.TIME_LIMIT, text, seconds) for text, seconds in DURATIONS.items()),
    ],
)
def test_a_setting_reads_its_type(setting, text, expected):
    assert setting.read({setting.name: text}) == expected


@pytest.mark.parametrize(
    ("setting", "text", "accepted"),
    [
        (settings.STRICT, "2", "1, true, yes, on, 0, false, no and off are accepted"),
        (settings.ALGORITHM, "best", f"{', '.join(settings.ALGORITHM.choices)} are accepted"),
        (settings.INTER_TRANSPORT, "tcp", f"{', '.join(settings.INTER_TRANSPORT.choices)} are accepted"),
        (settings.CHUNK_BYTES, "much", "a number and B, KiB"),
        (settings.MAX_MESSAGE_BYTES, "0", "at least 1 byte is accepted"),
        (settings.TIMEOUT_SECONDS, "-1", "a number of seconds >= 0 is accepted"),
        (settings.TIMEOUT_SECONDS, "soon", "a number of seconds >= 0 is accepted"),
        (settings.TIMEOUT_SECONDS, "inf", "a number of seconds >= 0 is accepted"),
        (settings.TIMEOUT_SECONDS, "nan", "a number of seconds >= 0 is accepted"),
        (settings.TIME_LIMIT, "1:1:1:1", NO_DURATION),
        (settings.TIME_LIMIT, "-5", NO_DURATION),
        *(
            (settings.TIME_LIMIT, text, NO_DURATION)
            for text in ("1-", "m", "1:30m", "-5m", "10 minutes", "inf", "infm", "1:inf", "1e999")
        ),
    ],
)
def test_an_unreadable_value_names_the_variable_and_what_is_accepted(setting, text, accepted):
    with pytest.raises(errors.SettingError) as caught:
        setting.read({setting.name: text})
    message = str(caught.value)
    assert message.startswith(f"{setting.name}={text!r} was found; ")
    assert accepted in message
    assert message.endswith(f"Meaning: {setting.meaning}")


def test_every_transport_can_be_asked_for_and_no_other():
    named = {*settings.INTRA_TRANSPORT.choices, *settings.INTER_TRANSPORT.choices}
    assert named == {"auto", *TRANSPORTS, *DEVICE_TRANSPORTS, "cuda_aware"}


def test_the_environment_is_read_when_asked(monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHUNK_BYTES", "1KiB")
    assert settings.CHUNK_BYTES.read() == 1024
    monkeypatch.setenv("MPISTRAT_CHUNK_BYTES", "2KiB")
    assert settings.CHUNK_BYTES.read() == 2048


BUILT_IN = (OSError, RuntimeError, StopIteration, TimeoutError, TypeError, ValueError)


def test_every_error_is_listed():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert sorted(kind.__name__ for kind in kinds) == errors.__all__ == sorted(errors.__all__)
    for kind in kinds:  # a program catches what it would without this library
        assert kind.__doc__
        assert issubclass(kind, errors.MpistratError)
        assert str(kind("rank 5: found this, do that")) == "rank 5: found this, do that"
        assert kind("").raised_everywhere is (kind.__name__ in ("AgreementError", "CheckpointError"))
        assert kind in (errors.MpistratError, errors.CollectiveError) or issubclass(kind, BUILT_IN), kind


# a program that configures logging of its own: only what it says of `mpistrat` changes what mpistrat does
CONFIGURED = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="root %(message)s")
if sys.argv[1:]:
    own = logging.getLogger("mpistrat")
    own.addHandler(logging.StreamHandler(sys.stdout))
    own.setLevel(logging.ERROR)
    own.propagate = False
from mpistrat.logger import logger
logger.error("an error")
logger.info("a remark")
"""


class _Stream(io.StringIO):
    writes = 0

    def write(self, text):
        self.writes += 1
        return super().write(text)


def test_each_line_says_whose_it_is_and_all_are_one_write(monkeypatch):
    stream = _Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    logger.warning("waits, 100% of the time\n  missing: rank 1")
    assert stream.getvalue() == "mpistrat: waits, 100% of the time\nmpistrat:   missing: rank 1\n"
    assert stream.writes == 1


def test_remarks_are_shown_warnings_once_and_an_error_comes_with_its_traceback(capsys):
    logger.info("measured")
    try:
        raise ValueError("for example")
    except ValueError:
        logger.exception("nobody watches")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["mpistrat: measured", "mpistrat: nobody watches", "mpistrat: Traceback (most recent call last):"]
    assert lines[-1] == "mpistrat: ValueError: for example"
    for text in ("first", "again"):
        warn_once("a key of this test", text)
    warn_once("another key of this test", "other")
    assert capsys.readouterr().err == "mpistrat: first\nmpistrat: other\n"


@pytest.mark.parametrize(
    ("words", "said"), [((), ("", "mpistrat: an error\nmpistrat: a remark\n")), (("configured",), ("an error\n", ""))]
)
def test_what_the_program_has_configured_for_it_holds_and_all_else_does_not(words, said):
    done = python(CONFIGURED, *words)
    assert (done.stdout, done.stderr) == said


def run(program):
    """Return what a program of its own prints, and the last line of its errors."""
    done = python(program)
    return done.stdout, done.stderr.rstrip().rpartition("\n")[2]


PROGRAM = """
import atexit
from mpistrat.ending import Stage, at, forget, watch_finalize
for stage in reversed(Stage):
    at(stage, lambda stage=stage: print(stage.name))
    at(stage, lambda stage=stage: print("the last of", stage.name))
    at(stage, print)
    forget(stage, print)
    forget(stage, print)
"""


def test_stages_follow_each_other_and_all_is_done_even_if_something_raises():
    names = ("FAIL", "FINISH", "COMPARE", "MEET", "CLOSE")
    expected = "".join(f"the last of {name}\n{name}\n" for name in names)
    assert run(PROGRAM + "atexit.register(print, 'a handler of the program')") == (f"a handler of the program\n{expected}", "")
    out, error = run(PROGRAM + "at(Stage.FINISH, lambda: 1 // 0)")
    assert (out.endswith("CLOSE\n"), error) == (True, "ZeroDivisionError: integer division or modulo by zero")


def test_where_the_program_finalizes_mpi_ranks_meet_before_and_later_calls_are_refused():
    ended = run(PROGRAM + "watch_finalize()\nfrom mpi4py import MPI\nMPI.Finalize()\nprint('finalized')")[0]
    first, _, later = ended.partition("finalized\n")
    assert first == "".join(f"the last of {name}\n{name}\n" for name in ("COMPARE", "REFUSE", "MEET"))
    assert later.startswith("the last of FAIL")
    assert run(PROGRAM + "watch_finalize()")[0].count("COMPARE") == 2
