"""Every name of tf.distribute is here, or is explained; what is said to be here is, and nothing of ours is left out."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.docs.generate import generated
from tests.docs.pages import ROOT
from tests.docs.surface import beyond, public_names, resolve
from tests.docs.tf_names import LATER, NOT_PLANNED, READING, SAME, SECTIONS, Row

ROWS = [row for section in SECTIONS.values() for row in section]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
HERE = [row for row in ROWS if row.status in (SAME, READING)]
ABSENT = [row for row in ROWS if row.status in (LATER, NOT_PLANNED)]


def name_of(row: Row) -> str:
    return row.tf.partition("(")[0]


@pytest.fixture(scope="module")
def page():
    return generated()[ROOT / "docs/reference/tf-names.md"]


def test_every_row_has_one_of_the_statuses():
    assert [row.tf for row in ROWS if row not in HERE and row not in ABSENT] == []


@pytest.mark.parametrize("row", HERE, ids=name_of)
def test_what_is_said_to_be_here_is(row):
    resolve(row.ours)


@pytest.mark.parametrize("row", [row for row in ABSENT if not row.ours.rpartition(".")[2].startswith("_")], ids=name_of)
def test_what_is_said_to_be_absent_is(row):
    with pytest.raises(AttributeError):
        resolve(row.ours)


@pytest.mark.parametrize("row", [row for row in ROWS if row.status != SAME], ids=name_of)
def test_what_differs_is_explained_in_one_sentence(row):
    assert re.fullmatch(r"[^.].*\.", row.remark), row.remark


@pytest.mark.parametrize("row", [row for row in HERE if row.arguments], ids=name_of)
def test_arguments_have_the_same_names_and_order(row):
    parameters = inspect.signature(resolve(row.ours)).parameters
    taken = [name.lstrip("*") for name in row.arguments]
    explained = set(re.findall(r"`\*?(\w+)`", row.remark))
    missing = [name for name in taken if name not in parameters and name not in explained]
    assert missing == [], f"{row.ours} takes {', '.join(parameters)}"
    empty = inspect.Parameter.empty
    required = [name for name, parameter in parameters.items() if parameter.default is empty and parameter.kind in _NAMED]
    added = [name for name in required if name not in taken and name not in explained and name != "self"]
    assert added == [], "required here, and unknown to a program for TensorFlow"
    shared = [name for name in taken if name in parameters]
    assert [name for name in parameters if name in shared] == shared, "in another order"


def test_no_public_name_is_left_out(page):
    shown = set(re.findall(r"`([\w.]+)", page))
    assert [name for name in public_names() if name not in shown and name in beyond()] == []


def test_what_is_beyond_is_described(page):
    section = page.partition("## Beyond TensorFlow")[2]
    assert set(re.findall(r"^\| `([\w.]+)", section, re.MULTILINE)) == set(beyond())
    assert re.findall(r"^\| (`[^`]+`) \|\s*\|$", section, re.MULTILINE) == [], "no caption says what it is"


# the names of the specification, by the class or module they belong to
PART_A = {
    "": (
        "get_strategy has_strategy get_replica_context in_cross_replica_context experimental_set_strategy get_loss_reduction "
        "Strategy RunOptions ReplicaContext CrossDeviceOps ReductionToOneDevice NcclAllReduce HierarchicalCopyAllReduce "
        "CollectiveAllReduce AllReduceCrossDeviceOps MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy "
        "TPUStrategy InputContext InputOptions DistributedDataset DistributedIterator DistributedValues PerReplica Mirrored "
        "ClusterSpec Server is_chief id_in_cluster worker_count Variable IndexedSlices "
        "enter_or_assert_strategy get_update_replica_id"
    ),
    "Strategy": (
        "extended num_replicas_in_sync cluster_resolver scope run reduce gather experimental_distribute_dataset "
        "distribute_datasets_from_function experimental_distribute_datasets_from_function "
        "experimental_distribute_values_from_function experimental_local_results unwrap group configure update_config_proto "
        "experimental_run make_dataset_iterator make_input_fn_iterator experimental_make_numpy_dataset colocate_vars_with "
        "broadcast"
    ),
    "StrategyExtended": (
        "reduce_to batch_reduce_to update value_container variable_created_in_scope colocate_vars_with worker_devices "
        "parameter_devices experimental_require_static_shapes broadcast_to call_for_each_replica read_var update_non_slot "
        "non_slot_devices experimental_between_graph experimental_should_init should_checkpoint should_save_summary"
    ),
    "ReplicaContext": (
        "replica_id_in_sync_group num_replicas_in_sync strategy devices all_reduce all_gather merge_call _update "
        "summary_recorded"
    ),
    "ReduceOp": "SUM MEAN from_variable_aggregation",
    "VariableSynchronization": "AUTO NONE ON_WRITE ON_READ",
    "VariableAggregation": "NONE SUM MEAN ONLY_FIRST_REPLICA",
    "InputReplicationMode": "PER_WORKER PER_REPLICA",
    "AutoShardPolicy": "OFF AUTO FILE DATA HINT",
    "CrossDeviceOps": (
        "reduce batch_reduce broadcast reduce_implementation batch_reduce_implementation broadcast_implementation"
    ),
    "InputContext": "num_input_pipelines input_pipeline_id num_replicas_in_sync get_per_replica_batch_size",
    "InputOptions": (
        "experimental_fetch_to_device experimental_replication_mode experimental_place_dataset_on_device "
        "experimental_per_replica_buffer_size"
    ),
    "DistributedDataset": "element_spec",
    "DistributedIterator": "next get_next get_next_as_optional element_spec",
    "DistributedValues": "values",
    "Variable": (
        "name dtype shape synchronization aggregation trainable distribute_strategy values assign assign_add assign_sub "
        "scatter_add scatter_sub scatter_div scatter_mul scatter_min scatter_max scatter_update"
    ),
    "IndexedSlices": "values indices dense_shape",
    "ClusterSpec": "as_dict jobs num_tasks task_indices task_address job_tasks",
    "Server": "start join server_def target create_local_server",
    "TPUStrategy": (
        "experimental_assign_to_logical_device experimental_split_to_logical_devices experimental_replicate_to_logical_devices"
    ),
    "experimental": (
        "CommunicationOptions CollectiveHints CommunicationImplementation CollectiveCommunication ValueContext "
        "MultiWorkerMirroredStrategy CentralStorageStrategy ParameterServerStrategy ShardedVariable TerminationConfig "
        "PreemptionCheckpointHandler PreemptionWatcher"
    ),
    "experimental.CommunicationOptions": "bytes_per_pack timeout_seconds implementation merge",
    "experimental.CommunicationImplementation": "AUTO RING NCCL",
    "experimental.ValueContext": "replica_id_in_sync_group num_replicas_in_sync",
    "experimental.partitioners": "Partitioner FixedShardsPartitioner MinSizePartitioner MaxSizePartitioner",
    "experimental.ShardedVariable": "variables",
    "experimental.coordinator": "ClusterCoordinator PerWorkerValues RemoteValue",
    "experimental.coordinator.ClusterCoordinator": "schedule join done create_per_worker_dataset fetch strategy",
    "experimental.coordinator.RemoteValue": "fetch get",
    "experimental.PreemptionCheckpointHandler": "run save_checkpoint_if_preempted watch_preemption_scope total_run_calls",
    "experimental.PreemptionWatcher": "preemption_message block_until_worker_exit",
    "cluster_resolver": (
        "ClusterResolver SimpleClusterResolver UnionResolver TFConfigClusterResolver SlurmClusterResolver "
        "KubernetesClusterResolver GCEClusterResolver SageMakerClusterResolver TPUClusterResolver"
    ),
    "cluster_resolver.ClusterResolver": "cluster_spec master num_accelerators task_type task_id rpc_layer environment",
    "cluster_resolver.SlurmClusterResolver": "get_task_info",
}


def test_every_name_of_the_specification_is_there_or_explained(page):
    wanted = {f"{owner}.{name}".lstrip(".") for owner, names in PART_A.items() for name in names.split()}
    assert sorted(wanted - {name_of(row) for row in ROWS}) == []
    first_cells = set(re.findall(r"^\| `([\w.]+)", page, re.MULTILINE))
    assert sorted(wanted - first_cells) == []
