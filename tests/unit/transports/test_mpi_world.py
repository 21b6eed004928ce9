"""Which way an all-reduce over all ranks takes through MPI."""

import pytest

from mpistrat.topology.world import World
from mpistrat.transports.mpi_world import Route, route

KIB = 1 << 10
AT_ONCE, LEADERS, IN_TURN = Route(False), Route(True), Route(True, in_turn=True)


@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        ("1x8", {8: AT_ONCE, 16 * KIB: AT_ONCE}),
        ("8x1", {8: AT_ONCE, 16 * KIB: AT_ONCE}),
        ("4x2", {8: IN_TURN, 4 * KIB: IN_TURN, 8 * KIB: IN_TURN, 32 * KIB: LEADERS, 64 * KIB: AT_ONCE}),
        ("4x2:cyclic", {4 * KIB: IN_TURN, 8 * KIB: IN_TURN, 64 * KIB: AT_ONCE}),
        ("4x4", {8: IN_TURN, 16 * KIB: IN_TURN, 32 * KIB: LEADERS, 64 * KIB: AT_ONCE}),
        ("2x4", {8: LEADERS, 4 * KIB: AT_ONCE, 8 * KIB: IN_TURN, 32 * KIB: IN_TURN, 64 * KIB: LEADERS, 128 * KIB: AT_ONCE}),
        ("8x4", {8: LEADERS, 32 * KIB: LEADERS, 64 * KIB: AT_ONCE}),
        ("3+1+2+2", {8: IN_TURN, 32 * KIB: LEADERS, 256 * KIB: LEADERS, 512 * KIB: AT_ONCE}),
        ("3x2", {8: IN_TURN, 64 * KIB: LEADERS, 128 * KIB: AT_ONCE}),
    ],
)
def test_route_is_the_one_that_was_measured_to_be_short(shape: str, ways: dict[int, Route]) -> None:
    assert {nbytes: route(World.from_shape(shape), nbytes) for nbytes in ways} == ways
