"""The logger: on stderr by default, in one write; elsewhere where the program says so."""

import io
import sys

import pytest

from mpistrat.logger import logger, warn_once
from tests.processes import python

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


def test_remarks_are_shown_and_an_error_comes_with_its_traceback(capsys):
    logger.info("measured")
    try:
        raise ValueError("for example")
    except ValueError:
        logger.exception("nobody watches")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["mpistrat: measured", "mpistrat: nobody watches", "mpistrat: Traceback (most recent call last):"]
    assert lines[-1] == "mpistrat: ValueError: for example"


def test_a_warning_is_logged_once(capsys):
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
