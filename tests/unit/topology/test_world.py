"""World: shapes, places, and who owns which shard; devices by name, and GPUs that do not go together."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.device.binding import own_device
from mpistrat.device.cuda import Identity
from mpistrat.errors import InvalidArgumentError, TopologyError
from mpistrat.launch.bootstrap import Bound
from mpistrat.topology.discover import Answer, check_answers
from mpistrat.topology.world import DeviceSpec, World, device_name, parse_device, parse_shape, ranks_of
from tests.unit.worlds import random_worlds


@pytest.mark.parametrize(
    ("shape", "nodes", "placement"),
    [
        ("2x2", [(0, 1), (2, 3)], "block"),
        ("2x2:block", [(0, 1), (2, 3)], "block"),
        ("2x2:cyclic", [(0, 2), (1, 3)], "cyclic"),
        ("3+1", [(0, 1, 2), (3,)], "block"),
        (" 3+1 : cyclic ", [(0, 2, 3), (1,)], "cyclic"),
        ("1+3", [(0,), (1, 2, 3)], "block"),
        ("5", [(0, 1, 2, 3, 4)], "block"),
    ],
)
def test_shape_places_ranks(shape, nodes, placement):
    world = World.from_shape(shape)
    assert ([node.ranks for node in world.nodes], world.placement) == (nodes, placement)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            ["", "x", "2x", "x2", "2x2x2", "2+", "+1", "a", "-1x2", "2x2:random", "2 x 2", "1.5x2", "2x2+1"],
            r"is malformed; accepted are NODESxRANKS \(2x4\)",
        ),
        (["0x2", "2x0", "0", "3+0", f"{2**40}x0"], "has a node without ranks or no nodes; accepted are"),
        ([f"{2**40}x2", f"2x{2**40}", f"{2**40}+1"], "has more than 1048576 ranks"),
    ],
)
def test_a_shape_that_is_none_says_what_is_accepted(shapes, message):
    for shape in shapes:
        for read in (parse_shape, World.from_shape):
            with pytest.raises(TopologyError, match=message):
                read(shape)


def test_a_shape_of_other_ranks_is_refused_and_nodes_are_ordered_by_lowest_rank():
    with pytest.raises(TopologyError, match="node shape '2x2' describes 4 ranks, but there are 3"):
        World.from_shape("2x2", num_ranks=3)
    assert World.from_shape("2x2", num_ranks=4).size == 4
    with pytest.raises(TopologyError, match="at least one rank"):
        World.from_node_of_rank([])
    world = World.from_node_of_rank([7, 3, 7], names=["b", "a", "b"])
    assert [(node.index, node.name, node.ranks) for node in world.nodes] == [(0, "b", (0, 2)), (1, "a", (1,))]
    assert world.leaders == (0, 1)
    assert World.from_node_of_rank([0, 1, 1, 0]).placement == "mixed"


@given(random_worlds)
def test_ranks_have_one_place_and_shards_one_owner_per_node_and_tile(world):
    assert sorted(rank for node in world.nodes for rank in node.ranks) == list(range(world.size))
    for rank in range(world.size):
        place = world.place(rank)
        assert world.nodes[place.node.index].ranks[place.local_rank] == rank
    for node in world.nodes:
        owned = [shard for rank in node.ranks for shard in world.shards_of(rank)]
        assert owned == list(range(world.num_shards)), "in rank order, each shard once"
        counts = [len(world.shards_of(rank)) for rank in node.ranks]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1, "evenly shared"
    assert len(world.rails) == world.num_shards
    for shard, rail in enumerate(world.rails):
        assert [world.place(rank).node.index for rank in rail] == list(range(world.num_nodes))
        assert all(shard in world.shards_of(rank) for rank in rail)
        assert rail == tuple(world.owner(shard, node) for node in range(world.num_nodes))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sampled_from(["block", "cyclic"]))
def test_shape_is_read_back(sizes, placement):
    world = World.from_shape("+".join(map(str, sizes)) + ":" + placement)
    assert world.local_sizes == tuple(sizes)
    assert World.from_shape(world.shape).local_sizes == world.local_sizes


OWN = DeviceSpec("CPU")


NAMES = {
    OWN: ["/cpu:0", "CPU:0", "cpu", "/CPU", "/device:CPU:0", "device:cpu:0", " /cpu:0 "],
    DeviceSpec("CPU", 1): ["/cpu:1"],
    DeviceSpec("CPU", rank=2): ["/job:worker/replica:0/task:2/cpu:0", "/job:worker/task:2/device:CPU:0"],
    DeviceSpec("GPU"): ["/gpu:0"],
    DeviceSpec("GPU", 1): ["/device:GPU:1"],
    DeviceSpec("GPU", 3): ["GPU:3"],
    DeviceSpec("GPU", rank=1): ["/job:worker/replica:0/task:1/device:GPU:0"],
    DeviceSpec("", rank=3): ["rank:3"],
    DeviceSpec("", rank=12): ["Rank:12"],
}


@pytest.mark.parametrize("device", NAMES, ids=str)
def test_a_name_is_read_as_tensorflow_spells_it(device):
    assert {parse_device(name) for name in NAMES[device]} == {device}
    assert parse_device("/job:localhost/replica:0/task:0/device:CPU:0") == OWN


def test_a_name_is_that_of_the_device_of_some_ranks():
    assert device_name(3) == "/job:worker/replica:0/task:3/device:CPU:0"
    assert parse_device(device_name(3)) == DeviceSpec("CPU", rank=3)
    assert own_device() == "/cpu:0"
    world = World.from_shape("2+1")
    assert ranks_of("/cpu:0", world) == (0, 1, 2)
    assert ranks_of("rank:2", world) == ranks_of(device_name(2), world) == (2,)
    assert ranks_of("/cpu:0", World.from_shape("1x1")) == (0,)


ACCEPTED = "accepted are /cpu:0, CPU:0, /gpu:0, /device:CPU:0, /job:worker/replica:0/task:1/device:CPU:0 and rank:1"
NO_NAMES = ["", "tpu:0", "/device:TPU:0", "rank:", "rank:-1", "rank3", "cpu:x", "cpu:-1", "/task:1/cpu:0", "//cpu:0"]
NO_RANK = "device {!r} names a task that is not a rank: rank R is /job:worker/replica:0/task:R, "
NO_RANK += "and /job:localhost is the calling rank"
JOBS = ["/job:ps/replica:0/task:0", "/job:worker/replica:1/task:0", "/job:localhost/replica:0/task:1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "{!r} is not a device name") for name in [*NO_NAMES, 3, None, ["cpu"]]),
        *((f"{job}/device:CPU:0", NO_RANK) for job in JOBS),
        ("/job:worker/device:CPU:0", "device {!r} does not name a task"),
    ],
)
def test_what_is_not_the_name_of_a_device_of_a_rank(name, message):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_device(name)
    assert str(caught.value) == f"{message.format(name)}; {ACCEPTED}"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("/gpu:0", "1x2", "ranks compute on CPUs here; {} to rank:1"),
        ("/job:worker/replica:0/task:0/device:GPU:0", "1x1", "ranks compute on CPUs here; {}"),
        ("/cpu:1", "1x2", "each rank drives one device; {} to rank:1"),
        ("rank:2", "1x2", "there is no rank 2; {} to rank:1"),
        ("/job:worker/replica:0/task:9/device:CPU:0", "2x2", "there is no rank 9; {} to rank:3"),
    ],
)
def test_a_device_that_nobody_has(name, shape, message):
    message = message.format("accepted are /cpu:0 (each rank's own) and rank:0")
    with pytest.raises(InvalidArgumentError, match=re.escape(f"device {name!r} does not exist: {message}")):
        ranks_of(name, World.from_shape(shape))


def check_gpus(gpus, allow_shared):
    check_answers([Answer(node, (0, 1), Bound(""), Identity("GRID", uuid, bus)) for node, uuid, bus in gpus], allow_shared)


def test_one_gpu_for_each_rank_is_accepted_also_without_a_uuid():
    check_gpus([("node0", "a", "0"), ("node0", "b", "0"), ("node1", "c", "0"), ("node1", "d", "0")], allow_shared=False)
    # the UUIDs of two nodes, cut short in the same way, or of a driver that is virtual
    check_gpus([("node0", "ab", "0"), ("node1", "ab", "0")], allow_shared=False)
    twins = [(node, "0" * 32, bus) for node, bus in (("node0", "a"), ("node0", "b"), ("node1", "a"))]
    check_gpus(twins, allow_shared=False)
    check_gpus([*twins, twins[0]], allow_shared=True)
    named = r"ranks 0, 3 drive the same GPU, GRID a on node0 \(.*--gpu-bind=none.*MPISTRAT_ALLOW_SHARED_GPU=1"
    with pytest.raises(TopologyError, match=named):
        check_gpus([*twins, twins[0]], allow_shared=False)
