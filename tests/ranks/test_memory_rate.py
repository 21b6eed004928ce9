"""What memory allows, as all ranks measure it together."""

from mpistrat.tools.memory_rate import copy_bytes_per_second


def test_all_ranks_are_told_one_rate_that_a_machine_can_have(comm):
    rate = copy_bytes_per_second(comm, 1 << 16)
    assert 0 < rate < 1e15
    assert set(comm.allgather(rate)) == {rate}
