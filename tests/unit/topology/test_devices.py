"""Devices by name: TensorFlow's spellings, and rank:3."""

import re

import pytest

from mpistrat.device.binding import own_device
from mpistrat.errors import InvalidArgumentError
from mpistrat.topology.world import DeviceSpec, World, device_name, parse_device, ranks_of

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


def test_a_device_prints_as_its_name():
    for name in ("/cpu:0", "/gpu:1", "rank:3", "/job:worker/replica:0/task:1/device:GPU:0"):
        assert str(parse_device(name)) == name
    assert device_name(3) == "/job:worker/replica:0/task:3/device:CPU:0"
    assert parse_device(device_name(3)) == DeviceSpec("CPU", rank=3)
    assert own_device() == "/cpu:0"


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


def test_which_ranks_have_a_device():
    world = World.from_shape("2+1")
    assert ranks_of("/cpu:0", world) == (0, 1, 2)
    assert ranks_of("rank:2", world) == ranks_of(device_name(2), world) == (2,)
    assert ranks_of("/cpu:0", World.from_shape("1x1")) == (0,)


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
