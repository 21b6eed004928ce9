"""What is to be seen where a rank fails at a collective on a GPU: on CPUs, and on the stand-in, whose calls only enqueue."""

import os

import pytest

from tests.gpu import fault as fault_of
from tests.processes import patient

STAND_IN = """
import faulthandler, sys
faulthandler.dump_traceback_later(25)  # of a job that does not end
from mpistrat.launch.bootstrap import start
from tests.gpu import fault
from tests.gpu.bound import stand_in
from tests.gpu.stand_in import UNFINISHED

fault.DEADLINE_SECONDS = 1.5
with stand_in(start()) as device:
    fault.be_rank(*sys.argv[1:], delay=lambda: device.current_stream().put(lambda: UNFINISHED))
"""


@pytest.mark.parametrize("fault", fault_of.FAULTS["first"])
def test_the_job_ends_and_names_the_rank(fault):
    assert fault_of.end(fault, "first", {**os.environ, "MPISTRAT_DEVICE": "cpu"})[f"{fault}_seconds"] < patient(5)


def test_a_rank_that_nobody_names_is_missed(monkeypatch):
    monkeypatch.setattr(fault_of, "FAULTY", 7)
    with pytest.raises(AssertionError, match="nobody named rank 7"):
        fault_of.end("kill", "first", {**os.environ, "MPISTRAT_DEVICE": "cpu"})


@pytest.mark.parametrize("fault", fault_of.FAULTS["late"])
def test_a_rank_that_waits_for_the_gpu_of_the_faulty_one_is_ended(fault):
    figures = fault_of.end(fault, "late", {**os.environ, "MPISTRAT_ALLOW_SHARED_GPU": "1"}, ("-c", STAND_IN))
    assert figures[f"{fault}_seconds"] < patient(10)
    # a rank that has aborted NCCL for its deadline has a second to make its next call, which raises
    assert fault == "stop" or not figures[f"{fault}_read_on"]
