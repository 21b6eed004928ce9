"""The route of an all-reduce over all ranks through MPI."""

import pytest

from mpistrat.topology.world import World
from mpistrat.transports.mpi_world import Route, route

KIB = 1 << 10
ONE_CALL, LEADERS, LINEAR = Route(False), Route(True), Route(True, linear=True)


@pytest.mark.parametrize(
    ("shape", "routes"),
    [
        ("1x8", {8: ONE_CALL, 16 * KIB: ONE_CALL}),
        ("8x1", {8: ONE_CALL, 16 * KIB: ONE_CALL}),
        ("4x2", {8: LINEAR, 4 * KIB: LINEAR, 8 * KIB: LINEAR, 32 * KIB: LEADERS, 64 * KIB: ONE_CALL}),
        ("4x2:cyclic", {4 * KIB: LINEAR, 8 * KIB: LINEAR, 64 * KIB: ONE_CALL}),
        ("4x4", {8: LINEAR, 16 * KIB: LINEAR, 32 * KIB: LEADERS, 64 * KIB: ONE_CALL}),
        ("2x4", {8: LEADERS, 4 * KIB: ONE_CALL, 8 * KIB: LINEAR, 32 * KIB: LINEAR, 64 * KIB: LEADERS, 128 * KIB: ONE_CALL}),
        ("8x4", {8: LEADERS, 32 * KIB: LEADERS, 64 * KIB: ONE_CALL}),
        ("3+1+2+2", {8: LINEAR, 32 * KIB: LEADERS, 256 * KIB: LEADERS, 512 * KIB: ONE_CALL}),
        ("3x2", {8: LINEAR, 64 * KIB: LEADERS, 128 * KIB: ONE_CALL}),
    ],
)
def test_route_is_the_one_that_was_measured_to_be_fast(shape: str, routes: dict[int, Route]) -> None:
    assert {nbytes: route(World.from_shape(shape), nbytes) for nbytes in routes} == routes
