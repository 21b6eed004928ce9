"""Which GPUs of several ranks do not go together."""

import pytest

from mpistrat.device.abstract import Identity
from mpistrat.errors import TopologyError
from mpistrat.launch.bootstrap import Bound
from mpistrat.topology.discover import Answer, Gpu, check_answers


def check_gpus(gpus, allow_shared):
    check_answers([Answer("node0", (0, 1), Bound(""), gpu) for gpu in gpus], allow_shared)


def _gpu(node="node0", uuid="a" * 32, index=0):
    return Gpu(node, index, Identity("NVIDIA H200", uuid, "0000:17:00.0"))


def test_one_gpu_for_each_rank_is_accepted():
    check_gpus([_gpu(uuid="a"), _gpu(uuid="b"), _gpu("node1", "c"), _gpu("node1", "d")], allow_shared=False)
    # the UUIDs of two nodes, cut short in the same way, or of a driver that is virtual
    check_gpus([_gpu("node0", "ab"), _gpu("node1", "ab")], allow_shared=False)


def test_gpus_without_a_uuid_are_told_apart_by_their_place():
    twins = [Gpu(node, 0, Identity("GRID", "0" * 32, bus)) for node, bus in (("node0", "a"), ("node0", "b"), ("node1", "a"))]
    check_gpus(twins, allow_shared=False)
    check_gpus([*twins, twins[0]], allow_shared=True)
    named = r"ranks 0, 3 drive the same GPU, GRID a on node0 \(.*--gpu-bind=none.*MPISTRAT_ALLOW_SHARED_GPU=1"
    with pytest.raises(TopologyError, match=named):
        check_gpus([*twins, twins[0]], allow_shared=False)
