"""The order in which things are done at the end of a program."""

from tests.processes import python


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


def test_stages_follow_each_other_and_what_was_registered_last_is_first_in_its_stage():
    names = ("FAIL", "FINISH", "COMPARE", "MEET", "CLOSE")
    expected = "".join(f"the last of {name}\n{name}\n" for name in names)
    assert run(PROGRAM + "atexit.register(print, 'a handler of the program')") == (f"a handler of the program\n{expected}", "")


def test_all_is_done_even_if_something_raises():
    out, error = run(PROGRAM + "at(Stage.FINISH, lambda: 1 // 0)")
    assert (out.endswith("CLOSE\n"), error) == (True, "ZeroDivisionError: integer division or modulo by zero")


def test_where_the_program_finalizes_mpi_ranks_meet_before_and_later_calls_are_refused():
    ended = run(PROGRAM + "watch_finalize()\nfrom mpi4py import MPI\nMPI.Finalize()\nprint('finalized')")[0]
    first, _, later = ended.partition("finalized\n")
    assert first == "".join(f"the last of {name}\n{name}\n" for name in ("COMPARE", "REFUSE", "MEET"))
    assert later.startswith("the last of FAIL")


def test_mpi_that_is_finalized_after_the_program_does_nothing_again():
    assert run(PROGRAM + "watch_finalize()")[0].count("COMPARE") == 2
