"""Random legal programs (see `tests.fuzz`) on every node shape: what they compute is what NumPy makes of it."""

from zlib import crc32

from tests.fuzz.cases import NUM_KINDS, Field
from tests.launches import up_to_ranks

TURNS = {1: 2, 2: 2}  # of each kind of case, by the number of ranks


@up_to_ranks(8)
def test_random_programs_are_right(comm, shape, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    field = Field(comm.Dup(), crc32(shape.encode()))
    for number in range(NUM_KINDS * TURNS.get(comm.size, 1)):
        problem = ""
        try:
            field.play(number, evenly=True)
        except AssertionError as error:
            problem = f"case {number} on rank {comm.rank}: {field.note}\n    {error}"
        problems = list(filter(None, comm.allgather(problem)))  # one that is wrong on one rank is wrong on all
        assert not problems, "\n".join(problems)
    field.close()
    field.comm.Free()
