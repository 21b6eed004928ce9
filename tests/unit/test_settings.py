"""Settings: what each variable accepts, what it defaults to, and what an error says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat import settings
from mpistrat.errors import SettingError
from mpistrat.execution.select import DEVICE_TRANSPORTS, TRANSPORTS
from mpistrat.settings import SETTINGS, parse_bytes


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
    with pytest.raises(SettingError) as caught:
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
