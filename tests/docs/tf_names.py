"""The names of tf.distribute, and the status of each here: the source of docs/reference/tf-names.md.

A name is spelt as in TensorFlow without ``tf.distribute.``, with the arguments of a call. An argument that ours does not take,
or takes under another name, is named in the remark, in backticks.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LATER", "NOT_PLANNED", "READING", "SAME", "SECTIONS", "Row"]

SAME = "same"
READING = "same, with a difference"
LATER = "later"
NOT_PLANNED = "not planned"


class Row(NamedTuple):
    """A name of TensorFlow's.

    Attributes
    ----------
    tf : str
        Its spelling, with arguments.
    status : str
        SAME, READING, LATER or NOT_PLANNED.
    remark : str
        One sentence; what is the same may go without.
    path : str
        Where it is below ``mpistrat``, if under another name.
    """

    tf: str
    status: str
    remark: str = ""
    path: str = ""

    @property
    def ours(self) -> str:
        """The dotted name below ``mpistrat``."""
        return self.path or self.tf.partition("(")[0]

    @property
    def arguments(self) -> list[str]:
        """The names of TensorFlow's arguments."""
        inside = self.tf.partition("(")[2].removesuffix(")")
        return [part.partition("=")[0].strip() for part in inside.split(",") if part.strip()]


_OLD = "Deprecated in TensorFlow; an alias that warns."
_GRAPHS = "For graphs and sessions, which do not exist here."
_PREEMPTION = "Checkpoints and preemption are planned."
_TPU = "For TPUs only."
_CLOUD = "Queries a cloud service; here MPI defines the cluster."

SECTIONS: dict[str, tuple[Row, ...]] = {
    "Functions": (
        Row("get_strategy()", SAME),
        Row("has_strategy()", SAME),
        Row("get_replica_context()", SAME),
        Row("in_cross_replica_context()", SAME),
        Row("experimental_set_strategy(strategy)", SAME),
        Row("get_loss_reduction()", SAME, "Deprecated in TensorFlow; always SUM."),
        Row(
            "enter_or_assert_strategy(strategy)",
            SAME,
            "Internal in TensorFlow, and here.",
            "context.stack.enter_or_assert_strategy",
        ),
        Row("get_update_replica_id()", SAME, "Internal in TensorFlow, and here.", "context.stack.get_update_replica_id"),
    ),
    "Strategy": (
        Row("Strategy(extended)", SAME),
        Row("Strategy.extended", SAME),
        Row("Strategy.num_replicas_in_sync", SAME),
        Row("Strategy.cluster_resolver", SAME),
        Row("Strategy.scope()", SAME),
        Row(
            "Strategy.run(fn, args=(), kwargs=None, options=None)", READING, "Every rank calls `fn` once, for its own replica."
        ),
        Row(
            "Strategy.reduce(reduce_op, value, axis)",
            READING,
            "Accepts nested values, and MIN, MAX and PROD; a collective call of all ranks, which also combines values that are "
            "not per-replica. Over an axis, SUM counts booleans.",
        ),
        Row(
            "Strategy.gather(value, axis)",
            READING,
            "Accepts nested values, and values that are not per-replica; a collective call of all ranks.",
        ),
        Row(
            "Strategy.experimental_distribute_dataset(dataset, options=None)",
            READING,
            "Global batches are split over all replicas, each of which is a rank of its own.",
        ),
        Row(
            "Strategy.distribute_datasets_from_function(dataset_fn, options=None)",
            READING,
            "Every rank is an input pipeline and calls `dataset_fn`; in TensorFlow every worker does.",
        ),
        Row("Strategy.experimental_distribute_datasets_from_function(dataset_fn, options=None)", SAME, _OLD),
        Row("Strategy.experimental_distribute_values_from_function(value_fn)", SAME),
        Row("Strategy.experimental_local_results(value)", READING, "A tuple of one: a rank holds one replica."),
        Row("Strategy.unwrap(value)", SAME, _OLD),
        Row("Strategy.group(value, name=None)", SAME, _OLD),
        Row("Strategy.configure(session_config=None, cluster_spec=None, task_type=None, task_id=None)", SAME, _OLD),
        Row("Strategy.update_config_proto(config_proto)", SAME, _OLD),
        Row("Strategy.experimental_run(fn, input_iterator=None)", SAME, _OLD),
        Row("Strategy.make_dataset_iterator(dataset)", SAME, _OLD),
        Row("Strategy.make_input_fn_iterator(input_fn, replication_mode)", SAME, _OLD),
        Row(
            "Strategy.experimental_make_numpy_dataset(numpy_input, session=None)",
            READING,
            "Needs the `batch_size` too: datasets consist of batches here.",
        ),
        Row("Strategy.colocate_vars_with(colocate_with_variable)", SAME, _OLD),
        Row(
            "Strategy.broadcast(tensor, destinations=None)",
            READING,
            "`tensor` is called `value`, and all replicas receive it: there is a `root` instead of `destinations`.",
        ),
        Row(
            "RunOptions(experimental_enable_dynamic_batch_size, experimental_bucketizing_dynamic_shape, "
            "experimental_xla_options)",
            SAME,
            "Accepted and ignored: its options are for TPUs.",
        ),
    ),
    "StrategyExtended": (
        Row(
            "StrategyExtended(container_strategy)",
            READING,
            "Takes a `communicator` instead of `container_strategy`; the strategy is set later.",
        ),
        Row(
            "StrategyExtended.reduce_to(reduce_op, value, destinations, options=None)",
            READING,
            "Accepts MIN, MAX and PROD too.",
        ),
        Row(
            "StrategyExtended.batch_reduce_to(reduce_op, value_destination_pairs, options=None)",
            READING,
            "Accepts MIN, MAX and PROD too.",
        ),
        Row(
            "StrategyExtended.update(var, fn, args=(), kwargs=None, group=True)",
            READING,
            "A per-replica value is accepted for an ON_READ variable, and refused for a mirrored one.",
        ),
        Row("StrategyExtended.value_container(value)", SAME),
        Row("StrategyExtended.variable_created_in_scope(v)", SAME),
        Row("StrategyExtended.colocate_vars_with(colocate_with_variable)", SAME),
        Row("StrategyExtended.worker_devices", READING, "The device of this rank."),
        Row("StrategyExtended.parameter_devices", READING, "The device of this rank."),
        Row("StrategyExtended.experimental_require_static_shapes", SAME, "Always False."),
        Row("StrategyExtended.broadcast_to(tensor, destinations)", SAME),
        Row("StrategyExtended.call_for_each_replica(fn, args=(), kwargs=None)", SAME),
        Row("StrategyExtended.read_var(v)", SAME),
        Row("StrategyExtended.update_non_slot(colocate_with, fn, args=(), kwargs=None, group=True)", SAME),
        Row("StrategyExtended.non_slot_devices(var_list)", SAME),
        Row("StrategyExtended.experimental_between_graph", SAME),
        Row("StrategyExtended.experimental_should_init", SAME),
        Row("StrategyExtended.should_checkpoint", READING, "True on one rank: the chief, or replica 0."),
        Row("StrategyExtended.should_save_summary", READING, "True on one rank: the chief, or replica 0."),
        Row(
            "StrategyExtended._create_variable(next_creator, **kwargs)",
            NOT_PLANNED,
            "A hook for authors of strategies; here a strategy consists of a communicator, a `CrossDeviceOps` and devices, "
            "which are arguments of `StrategyExtended`.",
        ),
    ),
    "ReplicaContext": (
        Row("ReplicaContext(strategy, replica_id_in_sync_group)", SAME),
        Row("ReplicaContext.replica_id_in_sync_group", SAME),
        Row("ReplicaContext.num_replicas_in_sync", SAME),
        Row("ReplicaContext.strategy", SAME),
        Row("ReplicaContext.devices", SAME, _OLD),
        Row(
            "ReplicaContext.all_reduce(reduce_op, value, options=None)",
            READING,
            "Accepts MIN, MAX and PROD, and a `weight`; if the calls of replicas differ, all raise. Outside `run`, in a "
            "job of several ranks, it warns that nothing is combined.",
        ),
        Row("ReplicaContext.all_gather(value, axis, options=None)", SAME),
        Row("ReplicaContext.merge_call(merge_fn, args=(), kwargs=None)", READING, "`merge_fn` runs once on every rank."),
        Row(
            "ReplicaContext._update(var, fn, args, kwargs, group)",
            READING,
            "Public here, as `update(variable, fn, args, kwargs)`; `var` is `variable`, and there is no `group`.",
            "ReplicaContext.update",
        ),
        Row(
            "ReplicaContext.summary_recorded",
            NOT_PLANNED,
            "There are no summaries; `should_save_summary` is true on the rank that writes logs.",
        ),
        Row("get_tower_context()", NOT_PLANNED, "Removed from TensorFlow before its version 2."),
    ),
    "Enumerations": (
        Row("ReduceOp", SAME),
        Row("ReduceOp.SUM", SAME),
        Row("ReduceOp.MEAN", SAME),
        Row("ReduceOp.from_variable_aggregation(aggregation)", SAME),
        Row("VariableSynchronization", SAME),
        Row("VariableSynchronization.AUTO", SAME),
        Row("VariableSynchronization.NONE", SAME),
        Row("VariableSynchronization.ON_WRITE", SAME),
        Row("VariableSynchronization.ON_READ", SAME),
        Row("VariableAggregation", SAME),
        Row(
            "VariableAggregation.NONE",
            READING,
            "Replicas may assign only equal values, which are compared; TensorFlow changes each copy independently.",
        ),
        Row("VariableAggregation.SUM", READING, "A value that all N replicas assign in `run` is summed N times."),
        Row("VariableAggregation.MEAN", SAME),
        Row("VariableAggregation.ONLY_FIRST_REPLICA", SAME),
        Row("experimental.CommunicationImplementation", SAME),
        Row("experimental.CommunicationImplementation.AUTO", SAME),
        Row("experimental.CommunicationImplementation.RING", READING, "Shared memory within a node and a ring between nodes."),
        Row("experimental.CommunicationImplementation.NCCL", SAME),
        Row("experimental.CollectiveCommunication", SAME, _OLD),
        Row("InputReplicationMode", SAME),
        Row(
            "InputReplicationMode.PER_WORKER",
            READING,
            "One rank is one replica, so both modes mean one pipeline per rank.",
        ),
        Row(
            "InputReplicationMode.PER_REPLICA",
            READING,
            "One rank is one replica, so both modes mean one pipeline per rank.",
        ),
        Row("AutoShardPolicy", SAME, "In TensorFlow below `tf.data.experimental`."),
        Row(
            "AutoShardPolicy.OFF",
            SAME,
            "In TensorFlow below `tf.data.experimental`; batches are rebatched across batch boundaries, as there.",
        ),
        Row("AutoShardPolicy.AUTO", SAME, "In TensorFlow below `tf.data.experimental`."),
        Row("AutoShardPolicy.FILE", SAME, "In TensorFlow below `tf.data.experimental`."),
        Row(
            "AutoShardPolicy.DATA",
            READING,
            "The rows of every global batch are split over the replicas; the numbers of rows differ by one at most.",
        ),
        Row("AutoShardPolicy.HINT", SAME, "In TensorFlow below `tf.data.experimental`."),
    ),
    "Communication options": (
        Row(
            "experimental.CommunicationOptions(bytes_per_pack=0, timeout_seconds=None, implementation=AUTO)",
            READING,
            "Has additional fields, and `timeout_seconds` applies under every strategy.",
        ),
        Row("experimental.CommunicationOptions.bytes_per_pack", SAME),
        Row("experimental.CommunicationOptions.timeout_seconds", SAME),
        Row("experimental.CommunicationOptions.implementation", SAME),
        Row("experimental.CommunicationOptions.merge(other)", SAME),
        Row("experimental.CollectiveHints(bytes_per_pack=0, timeout_seconds=None)", SAME, _OLD),
        Row(
            "ReplicaContext.all_reduce(reduce_op, value, experimental_hints=None)",
            SAME,
            "The old spelling of `options`, which warns.",
        ),
    ),
    "Cross-device operations": (
        Row("CrossDeviceOps()", SAME),
        Row(
            "CrossDeviceOps.reduce(reduce_op, per_replica_value, destinations, options=None)",
            SAME,
            "The result of a variable is a snapshot, as there.",
        ),
        Row("CrossDeviceOps.batch_reduce(reduce_op, value_destination_pairs, options=None)", SAME),
        Row("CrossDeviceOps.broadcast(tensor, destinations)", SAME),
        Row("CrossDeviceOps.reduce_implementation(reduce_op, per_replica_value, destinations, options)", SAME),
        Row("CrossDeviceOps.batch_reduce_implementation(reduce_op, value_destination_pairs, options)", SAME),
        Row("CrossDeviceOps.broadcast_implementation(tensor, destinations)", SAME),
        Row(
            "CrossDeviceOps._gather_implementation(per_replica_value, destinations, axis, options)",
            SAME,
            "Public, as `gather_implementation`.",
            "CrossDeviceOps.gather_implementation",
        ),
        Row("ReductionToOneDevice(reduce_to_device=None, accumulation_fn=None)", SAME),
        Row("NcclAllReduce(num_packs=1)", SAME, "Without NCCL, the error names an alternative."),
        Row("HierarchicalCopyAllReduce(num_packs=1)", SAME),
        Row(
            "CollectiveAllReduce(devices, group_size, options, collective_keys=None)",
            READING,
            "Internal in TensorFlow; `devices`, `group_size` and `collective_keys` follow from the ranks.",
        ),
        Row(
            "AllReduceCrossDeviceOps(all_reduce_alg='nccl', num_packs=1)",
            NOT_PLANNED,
            "Internal in TensorFlow; `CommunicationOptions(algorithm=…)` chooses here.",
        ),
    ),
    "Strategies": (
        Row("MirroredStrategy(devices=None, cross_device_ops=None)", READING, "The ranks of one node."),
        Row(
            "MultiWorkerMirroredStrategy(cluster_resolver=None, communication_options=None)",
            READING,
            "All ranks of the job; a resolver only assigns roles to them.",
        ),
        Row(
            "experimental.MultiWorkerMirroredStrategy(communication=AUTO, cluster_resolver=None)",
            SAME,
            "Deprecated in TensorFlow; warns, and every `MultiWorkerMirroredStrategy` is an instance of it, as there.",
        ),
        Row("OneDeviceStrategy(device)", READING, "This rank alone; it ignores the others."),
        Row(
            "experimental.CentralStorageStrategy(compute_devices=None, parameter_device=None)",
            READING,
            "The ranks of one node; the variables are kept on one of them, and every rank has a read-only copy.",
        ),
        Row("get_strategy()", SAME, "The default strategy, outside all scopes: one replica."),
        Row(
            "experimental.ParameterServerStrategy(cluster_resolver, variable_partitioner=None)",
            READING,
            "The tasks are the ranks of one MPI job; a variable goes to the server with the fewest bytes, with "
            '`placement="round_robin"` to each in turn.',
        ),
        Row("v1.ParameterServerStrategy(cluster_resolver=None)", NOT_PLANNED, "Version 2 is here."),
        Row("TPUStrategy", NOT_PLANNED, _TPU),
        Row("TPUStrategy.experimental_assign_to_logical_device", NOT_PLANNED, _TPU),
        Row("TPUStrategy.experimental_split_to_logical_devices", NOT_PLANNED, _TPU),
        Row("TPUStrategy.experimental_replicate_to_logical_devices", NOT_PLANNED, _TPU),
    ),
    "Input": (
        Row("InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)", SAME),
        Row(
            "InputContext.num_input_pipelines",
            READING,
            "The number of ranks: every rank is an input pipeline; TensorFlow has one for all replicas of a worker.",
        ),
        Row("InputContext.input_pipeline_id", READING, "The rank."),
        Row("InputContext.num_replicas_in_sync", SAME),
        Row("InputContext.get_per_replica_batch_size(global_batch_size)", SAME),
        Row("experimental.ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)", SAME),
        Row("experimental.ValueContext.replica_id_in_sync_group", SAME),
        Row("experimental.ValueContext.num_replicas_in_sync", SAME),
        Row(
            "InputOptions(experimental_fetch_to_device=None, experimental_replication_mode=PER_WORKER, "
            "experimental_place_dataset_on_device=False, experimental_per_replica_buffer_size=1)",
            READING,
            "Not a tuple; it also has the `auto_shard_policy`, which is an option of the dataset in TensorFlow.",
        ),
        Row("InputOptions.experimental_fetch_to_device", SAME),
        Row("InputOptions.experimental_replication_mode", SAME),
        Row("InputOptions.experimental_place_dataset_on_device", SAME),
        Row("InputOptions.experimental_per_replica_buffer_size", SAME),
        Row("DistributedDataset", SAME),
        Row("DistributedDataset.element_spec", SAME),
        Row("DistributedIterator", SAME),
        Row(
            "DistributedIterator.next()",
            READING,
            "`next(iterator)`; inside `run` it raises `ValueError`, as there.",
            "DistributedIterator.__next__",
        ),
        Row("DistributedIterator.get_next()", SAME),
        Row("DistributedIterator.get_next_as_optional()", SAME),
        Row("DistributedIterator.element_spec", SAME),
    ),
    "Values and variables": (
        Row("DistributedValues", SAME),
        Row("DistributedValues.values", READING, "A tuple of one: a rank holds one replica."),
        Row("PerReplica", READING, "Internal in TensorFlow; arithmetic outside `run` fails there too."),
        Row("Mirrored", READING, "Internal in TensorFlow."),
        Row(
            "Variable(initial_value, trainable, name, dtype, constraint, synchronization, aggregation, shape)",
            READING,
            "`tf.Variable` in TensorFlow, where the scope decides which class is created. Inside the scope of the default "
            "strategy no variables of another strategy can be created, in either.",
        ),
        Row("Variable.name", SAME),
        Row("Variable.dtype", SAME),
        Row("Variable.shape", SAME),
        Row("Variable.synchronization", SAME),
        Row("Variable.aggregation", SAME),
        Row("Variable.trainable", SAME),
        Row("Variable.distribute_strategy", SAME),
        Row("Variable.values", READING, "A tuple of one: a rank holds one replica."),
        Row("Variable.value", READING, "A property, not a method, and a view that changes with the variable."),
        Row("Variable.read_value()", SAME),
        Row("Variable.numpy()", SAME),
        Row("Variable.sparse_read(indices, name=None)", SAME),
        Row("Variable.gather_nd(indices, name=None)", SAME),
        Row("Variable.constraint", SAME),
        Row("Variable.is_initialized()", SAME),
        Row("Variable.initial_value", READING, "Raises, as in TensorFlow without graphs; the message says how to save it."),
        Row("Variable.initialized_value()", NOT_PLANNED, _GRAPHS),
        Row("Variable.initializer", NOT_PLANNED, _GRAPHS),
        Row("Variable.eval(session=None)", NOT_PLANNED, _GRAPHS),
        Row("Variable.load(value, session=None)", NOT_PLANNED, _GRAPHS),
        Row("Variable.count_up_to(limit)", NOT_PLANNED, "Deprecated in TensorFlow; `assign_add(1)` counts."),
        Row("Variable.ref()", NOT_PLANNED, "Use `id(variable)` as a key, as long as the variable exists."),
        Row("Variable.set_shape(shape)", NOT_PLANNED, "A variable always has the shape of its initial value."),
        Row(
            "Variable.assign(value, use_locking=False, name=None, read_value=True)",
            READING,
            "In `run`, a value that all N replicas assign is summed N times with SUM; with NONE it is assigned once; values "
            "that differ raise on all replicas, where TensorFlow lets the copies diverge.",
        ),
        Row("Variable.assign_add(delta, use_locking=False, name=None, read_value=True)", READING, "As `assign`."),
        Row("Variable.assign_sub(delta, use_locking=False, name=None, read_value=True)", READING, "As `assign`."),
        *(
            Row(f"Variable.scatter_{name}(sparse_delta, use_locking=False, name=None)", SAME)
            for name in ("add", "sub", "div", "mul", "min", "max", "update")
        ),
        *(
            Row(
                f"Variable.scatter_nd_{name}(indices, updates, name=None)",
                READING,
                "Works under every strategy, also in `run`; in TensorFlow only without a strategy.",
            )
            for name in ("add", "sub", "min", "max", "update")
        ),
        Row("Variable.batch_scatter_update(sparse_delta)", NOT_PLANNED, "`scatter_nd_update` takes indices of several axes."),
        Row("IndexedSlices(values, indices, dense_shape=None)", SAME, "`tf.IndexedSlices` in TensorFlow."),
        Row("IndexedSlices.values", SAME),
        Row("IndexedSlices.indices", SAME),
        Row("IndexedSlices.dense_shape", SAME),
    ),
    "Cluster": (
        Row("ClusterSpec(cluster)", SAME, "`tf.train.ClusterSpec` in TensorFlow."),
        Row("ClusterSpec.as_dict()", SAME),
        Row("ClusterSpec.jobs", SAME),
        Row("ClusterSpec.num_tasks(job_name)", SAME),
        Row("ClusterSpec.task_indices(job_name)", SAME),
        Row("ClusterSpec.task_address(job_name, task_index)", SAME),
        Row("ClusterSpec.job_tasks(job_name)", SAME),
        Row(
            "is_chief(cluster_spec, task_type, task_id)",
            SAME,
            "Internal in TensorFlow; `cluster_spec` is `cluster`.",
            "cluster.roles.is_chief",
        ),
        Row(
            "id_in_cluster(cluster_spec, task_type, task_id)",
            SAME,
            "Internal in TensorFlow; `cluster_spec` is `cluster`.",
            "cluster.roles.id_in_cluster",
        ),
        Row(
            "worker_count(cluster_spec, task_type)",
            SAME,
            "Internal in TensorFlow; `cluster_spec` is `cluster`.",
            "cluster.roles.worker_count",
        ),
        Row("cluster_resolver.ClusterResolver", SAME),
        Row("cluster_resolver.ClusterResolver.cluster_spec()", SAME),
        Row("cluster_resolver.ClusterResolver.master(task_type=None, task_id=None, rpc_layer=None)", SAME),
        Row("cluster_resolver.ClusterResolver.num_accelerators(task_type=None, task_id=None)", SAME),
        Row("cluster_resolver.ClusterResolver.task_type", SAME),
        Row("cluster_resolver.ClusterResolver.task_id", SAME),
        Row("cluster_resolver.ClusterResolver.rpc_layer", SAME),
        Row("cluster_resolver.ClusterResolver.environment", SAME),
        Row(
            "cluster_resolver.SimpleClusterResolver(cluster_spec, master='', task_type=None, task_id=None, "
            "environment='', num_accelerators=None, rpc_layer=None)",
            SAME,
        ),
        Row(
            "cluster_resolver.UnionResolver(*resolvers, rpc_layer, task_type, task_id)",
            SAME,
            "`rpc_layer`, `task_type` and `task_id` by keyword only.",
        ),
        Row("cluster_resolver.TFConfigClusterResolver(task_type=None, task_id=None, rpc_layer=None, environment=None)", SAME),
        Row(
            "cluster_resolver.SlurmClusterResolver(jobs=None, port_base=8888, gpus_per_node=None, "
            "gpus_per_task=None, tasks_per_node=None, auto_set_gpu=True, rpc_layer='grpc')",
            READING,
            "Never changes `CUDA_VISIBLE_DEVICES`.",
        ),
        Row("cluster_resolver.SlurmClusterResolver.get_task_info()", SAME),
        Row("cluster_resolver.KubernetesClusterResolver", NOT_PLANNED, _CLOUD),
        Row("cluster_resolver.GCEClusterResolver", NOT_PLANNED, _CLOUD),
        Row("cluster_resolver.SageMakerClusterResolver", NOT_PLANNED, _CLOUD),
        Row("cluster_resolver.TPUClusterResolver", NOT_PLANNED, _TPU),
    ),
    "Parameter servers": (
        Row(
            "Server(server_or_cluster_def, job_name=None, task_index=None, protocol=None, config=None, start=True)",
            READING,
            "For workers and servers; starting it is a collective call of all ranks, and `protocol` is only for `target`.",
        ),
        Row("Server.start()", SAME),
        Row("Server.join()", READING, "Returns when the chief closes the strategy or ends."),
        Row("Server.server_def", READING, "A dict."),
        Row("Server.target", SAME),
        Row(
            "Server.create_local_server(config=None, start=True)",
            NOT_PLANNED,
            "A server needs a chief, and both are ranks of one MPI job: `mpistrat run -n 3`.",
        ),
        Row("experimental.partitioners.Partitioner", SAME),
        Row("experimental.partitioners.FixedShardsPartitioner(num_shards)", SAME),
        Row("experimental.partitioners.MinSizePartitioner(min_shard_bytes, max_shards=1, bytes_per_string=16)", SAME),
        Row("experimental.partitioners.MaxSizePartitioner(max_shard_bytes, max_shards=None, bytes_per_string=16)", SAME),
        Row("experimental.ShardedVariable", SAME),
        Row("experimental.ShardedVariable.variables", SAME),
        Row("experimental.coordinator.ClusterCoordinator(strategy)", SAME),
        Row("experimental.coordinator.ClusterCoordinator.schedule(fn, args=None, kwargs=None)", SAME),
        Row("experimental.coordinator.ClusterCoordinator.join()", SAME),
        Row("experimental.coordinator.ClusterCoordinator.done()", SAME),
        Row(
            "experimental.coordinator.ClusterCoordinator.create_per_worker_dataset(dataset)",
            READING,
            "`dataset` is called `dataset_or_dataset_fn`; a function that takes an argument gets an `InputContext`.",
        ),
        Row(
            "experimental.coordinator.ClusterCoordinator.fetch(nest)",
            READING,
            "`nest` is called `val`, as in TensorFlow's code.",
        ),
        Row("experimental.coordinator.ClusterCoordinator.strategy", SAME),
        Row("experimental.coordinator.PerWorkerValues", SAME),
        Row("experimental.coordinator.RemoteValue", SAME),
        Row("experimental.coordinator.RemoteValue.fetch()", SAME),
        Row(
            "experimental.coordinator.RemoteValue.get()",
            SAME,
            "The value is on the chief already, so it is what `fetch` returns.",
        ),
    ),
    "Preemption": (
        Row(
            "experimental.TerminationConfig(termination_watcher_fn=None, exit_fn=None, grace_period=None, save_fn=None)",
            LATER,
            _PREEMPTION,
        ),
        Row(
            "experimental.PreemptionCheckpointHandler(cluster_resolver, checkpoint_or_checkpoint_manager, "
            "checkpoint_dir=None, termination_config=None)",
            LATER,
            _PREEMPTION,
        ),
        *(
            Row(f"experimental.PreemptionCheckpointHandler.{name}", LATER, _PREEMPTION)
            for name in (
                "run(fn, *args, **kwargs)",
                "save_checkpoint_if_preempted(*args, **kwargs)",
                "watch_preemption_scope()",
                "total_run_calls",
            )
        ),
        Row("experimental.PreemptionWatcher", NOT_PLANNED, _TPU),
        Row("experimental.PreemptionWatcher.preemption_message", NOT_PLANNED, _TPU),
        Row("experimental.PreemptionWatcher.block_until_worker_exit()", NOT_PLANNED, _TPU),
    ),
    "Errors": (
        Row(
            "DeadlineExceededError",
            READING,
            "Below `tf.errors` in TensorFlow; names the operation and the ranks that did not arrive, and is "
            "a `TimeoutError` too.",
            "errors.DeadlineExceededError",
        ),
        Row("UnavailableError", READING, "Below `tf.errors` in TensorFlow.", "errors.UnavailableError"),
        Row("OutOfRangeError", READING, "Below `tf.errors` in TensorFlow; is a `StopIteration` too.", "errors.OutOfRangeError"),
        Row(
            "InvalidArgumentError",
            READING,
            "Below `tf.errors` in TensorFlow; is a `ValueError` too.",
            "errors.InvalidArgumentError",
        ),
        Row("CancelledError", READING, "Below `tf.errors` in TensorFlow.", "errors.CancelledError"),
    ),
}
