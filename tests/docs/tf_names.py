# ruff: noqa: E501 - a name stands on one line, with all arguments of TensorFlow's
"""The names of tf.distribute here: the source of docs/reference/tf-names.md, which lists those that differ.

A name is spelt as in TensorFlow without ``tf.distribute.``, with the arguments of a call. Behind an arrow is where it is below
``mpistrat``, if under another name. An argument that ours does not take, or takes under another name, is named in the remark,
in backticks.
"""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    """A name of TensorFlow's: its spelling with arguments, where it is below ``mpistrat``, and what differs."""

    spelling: str
    path: str
    remark: str = ""

    @property
    def arguments(self) -> list[str]:
        """The names of TensorFlow's arguments."""
        inside = self.spelling.partition("(")[2].removesuffix(")")
        return [part.partition("=")[0].strip() for part in inside.split(",") if part.strip()]


def named(text: str, remark: str = "") -> list[Name]:
    """Return the names that a text has on its lines."""
    found = []
    for line in text.strip().splitlines():
        spelling, _, path = line.strip().partition(" -> ")
        found.append(Name(spelling, path or spelling.partition("(")[0], remark))
    return found


SAME = """
get_strategy()
experimental.PreemptionCheckpointHandler.save_checkpoint_if_preempted(*args, **kwargs)
experimental.PreemptionCheckpointHandler.watch_preemption_scope()
experimental.PreemptionCheckpointHandler.total_run_calls
has_strategy()
get_replica_context()
in_cross_replica_context()
experimental_set_strategy(strategy)
get_loss_reduction()
enter_or_assert_strategy(strategy) -> context.stack.enter_or_assert_strategy
get_update_replica_id() -> context.stack.get_update_replica_id
Strategy(extended)
Strategy.extended
Strategy.num_replicas_in_sync
Strategy.cluster_resolver
Strategy.scope()
Strategy.experimental_distribute_datasets_from_function(dataset_fn, options=None)
Strategy.experimental_distribute_values_from_function(value_fn)
Strategy.unwrap(value)
Strategy.group(value, name=None)
Strategy.configure(session_config=None, cluster_spec=None, task_type=None, task_id=None)
Strategy.update_config_proto(config_proto)
Strategy.experimental_run(fn, input_iterator=None)
Strategy.make_dataset_iterator(dataset)
Strategy.make_input_fn_iterator(input_fn, replication_mode)
Strategy.colocate_vars_with(colocate_with_variable)
RunOptions(experimental_enable_dynamic_batch_size, experimental_bucketizing_dynamic_shape, experimental_xla_options)
StrategyExtended.value_container(value)
StrategyExtended.variable_created_in_scope(v)
StrategyExtended.colocate_vars_with(colocate_with_variable)
StrategyExtended.experimental_require_static_shapes
StrategyExtended.broadcast_to(tensor, destinations)
StrategyExtended.call_for_each_replica(fn, args=(), kwargs=None)
StrategyExtended.read_var(v)
StrategyExtended.update_non_slot(colocate_with, fn, args=(), kwargs=None, group=True)
StrategyExtended.non_slot_devices(var_list)
StrategyExtended.experimental_between_graph
StrategyExtended.experimental_should_init
ReplicaContext(strategy, replica_id_in_sync_group)
ReplicaContext.replica_id_in_sync_group
ReplicaContext.num_replicas_in_sync
ReplicaContext.strategy
ReplicaContext.devices
ReplicaContext.all_gather(value, axis, options=None)
ReduceOp
ReduceOp.SUM
ReduceOp.MEAN
ReduceOp.from_variable_aggregation(aggregation)
VariableSynchronization
VariableSynchronization.AUTO
VariableSynchronization.NONE
VariableSynchronization.ON_WRITE
VariableSynchronization.ON_READ
VariableAggregation
VariableAggregation.MEAN
VariableAggregation.ONLY_FIRST_REPLICA
experimental.CommunicationImplementation
experimental.CommunicationImplementation.AUTO
experimental.CommunicationImplementation.NCCL
experimental.CollectiveCommunication
InputReplicationMode
AutoShardPolicy
AutoShardPolicy.OFF
AutoShardPolicy.AUTO
AutoShardPolicy.FILE
AutoShardPolicy.HINT
experimental.CommunicationOptions.bytes_per_pack
experimental.CommunicationOptions.timeout_seconds
experimental.CommunicationOptions.implementation
experimental.CommunicationOptions.merge(other)
experimental.CollectiveHints(bytes_per_pack=0, timeout_seconds=None)
ReplicaContext.all_reduce(reduce_op, value, experimental_hints=None)
CrossDeviceOps()
CrossDeviceOps.reduce(reduce_op, per_replica_value, destinations, options=None)
CrossDeviceOps.batch_reduce(reduce_op, value_destination_pairs, options=None)
CrossDeviceOps.broadcast(tensor, destinations)
CrossDeviceOps.reduce_implementation(reduce_op, per_replica_value, destinations, options)
CrossDeviceOps.batch_reduce_implementation(reduce_op, value_destination_pairs, options)
CrossDeviceOps.broadcast_implementation(tensor, destinations)
CrossDeviceOps._gather_implementation(per_replica_value, destinations, axis, options) -> CrossDeviceOps.gather_implementation
ReductionToOneDevice(reduce_to_device=None, accumulation_fn=None)
NcclAllReduce(num_packs=1)
HierarchicalCopyAllReduce(num_packs=1)
experimental.MultiWorkerMirroredStrategy(communication=AUTO, cluster_resolver=None)
get_strategy()
InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
InputContext.num_replicas_in_sync
InputContext.get_per_replica_batch_size(global_batch_size)
experimental.ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)
experimental.ValueContext.replica_id_in_sync_group
experimental.ValueContext.num_replicas_in_sync
InputOptions.experimental_fetch_to_device
InputOptions.experimental_replication_mode
InputOptions.experimental_place_dataset_on_device
InputOptions.experimental_per_replica_buffer_size
DistributedDataset
DistributedDataset.element_spec
DistributedIterator
DistributedIterator.get_next()
DistributedIterator.get_next_as_optional()
DistributedIterator.element_spec
DistributedValues
Variable.name
Variable.dtype
Variable.shape
Variable.synchronization
Variable.aggregation
Variable.trainable
Variable.distribute_strategy
Variable.read_value()
Variable.numpy()
Variable.sparse_read(indices, name=None)
Variable.gather_nd(indices, name=None)
Variable.constraint
Variable.is_initialized()
Variable.scatter_add(sparse_delta, use_locking=False, name=None)
Variable.scatter_sub(sparse_delta, use_locking=False, name=None)
Variable.scatter_div(sparse_delta, use_locking=False, name=None)
Variable.scatter_mul(sparse_delta, use_locking=False, name=None)
Variable.scatter_min(sparse_delta, use_locking=False, name=None)
Variable.scatter_max(sparse_delta, use_locking=False, name=None)
Variable.scatter_update(sparse_delta, use_locking=False, name=None)
IndexedSlices(values, indices, dense_shape=None)
IndexedSlices.values
IndexedSlices.indices
IndexedSlices.dense_shape
ClusterSpec(cluster)
ClusterSpec.as_dict()
ClusterSpec.jobs
ClusterSpec.num_tasks(job_name)
ClusterSpec.task_indices(job_name)
ClusterSpec.task_address(job_name, task_index)
ClusterSpec.job_tasks(job_name)
cluster_resolver.ClusterResolver
cluster_resolver.ClusterResolver.cluster_spec()
cluster_resolver.ClusterResolver.master(task_type=None, task_id=None, rpc_layer=None)
cluster_resolver.ClusterResolver.num_accelerators(task_type=None, task_id=None)
cluster_resolver.ClusterResolver.task_type
cluster_resolver.ClusterResolver.task_id
cluster_resolver.ClusterResolver.rpc_layer
cluster_resolver.ClusterResolver.environment
cluster_resolver.SimpleClusterResolver(cluster_spec, master='', task_type=None, task_id=None, environment='', num_accelerators=None, rpc_layer=None)
cluster_resolver.TFConfigClusterResolver(task_type=None, task_id=None, rpc_layer=None, environment=None)
cluster_resolver.SlurmClusterResolver.get_task_info()
Server.start()
Server.target
experimental.partitioners.Partitioner
experimental.partitioners.FixedShardsPartitioner(num_shards)
experimental.partitioners.MinSizePartitioner(min_shard_bytes, max_shards=1, bytes_per_string=16)
experimental.partitioners.MaxSizePartitioner(max_shard_bytes, max_shards=None, bytes_per_string=16)
experimental.ShardedVariable
experimental.ShardedVariable.variables
experimental.coordinator.ClusterCoordinator(strategy)
experimental.coordinator.ClusterCoordinator.schedule(fn, args=None, kwargs=None)
experimental.coordinator.ClusterCoordinator.join()
experimental.coordinator.ClusterCoordinator.done()
experimental.coordinator.ClusterCoordinator.strategy
experimental.coordinator.PerWorkerValues
experimental.coordinator.RemoteValue
experimental.coordinator.RemoteValue.fetch()
experimental.coordinator.RemoteValue.get()
"""

# what differs, and the names that it is true of
DIFFERENT: tuple[tuple[str, str], ...] = (
    ("Every rank calls `fn` once, for its own replica.", "Strategy.run(fn, args=(), kwargs=None, options=None)"),
    (
        "Accepts nested values, MIN, MAX and PROD. A value that is not distributed is what each rank passes: the MEAN of ranks "
        "that pass different ones is their mean, where TensorFlow returns its own to each. Over an axis, SUM counts booleans.",
        "Strategy.reduce(reduce_op, value, axis)",
    ),
    ("Accepts nested values, and values that are not per-replica.", "Strategy.gather(value, axis)"),
    (
        "Global batches are split over all replicas, each of which is a rank of its own.",
        "Strategy.experimental_distribute_dataset(dataset, options=None)",
    ),
    (
        "Every rank is an input pipeline and calls `dataset_fn`; in TensorFlow every worker does.",
        "Strategy.distribute_datasets_from_function(dataset_fn, options=None)",
    ),
    (
        "A tuple of one: a rank holds one replica.",
        """
Strategy.experimental_local_results(value)
DistributedValues.values
Variable.values
""",
    ),
    (
        "Needs the `batch_size` too: datasets consist of batches here.",
        "Strategy.experimental_make_numpy_dataset(numpy_input, session=None)",
    ),
    (
        "`tensor` is called `value`, and all replicas receive it: there is a `root` instead of `destinations`.",
        "Strategy.broadcast(tensor, destinations=None)",
    ),
    (
        "Takes a `communicator` instead of `container_strategy`; the strategy is set later.",
        "StrategyExtended(container_strategy)",
    ),
    (
        "Accepts MIN, MAX and PROD too; a value that is not distributed is taken as by `reduce()`.",
        """
StrategyExtended.reduce_to(reduce_op, value, destinations, options=None)
StrategyExtended.batch_reduce_to(reduce_op, value_destination_pairs, options=None)
""",
    ),
    (
        "Components of an argument that differ raise from the next collective, unless the variable is ON_READ.",
        "StrategyExtended.update(var, fn, args=(), kwargs=None, group=True)",
    ),
    ("The device of this rank; of a strategy on one node those of all its ranks.", "StrategyExtended.worker_devices"),
    (
        "As `worker_devices`; of `CentralStorageStrategy` the rank that keeps the variables.",
        "StrategyExtended.parameter_devices",
    ),
    (
        "True on one rank: the chief, or replica 0.",
        """
StrategyExtended.should_checkpoint
StrategyExtended.should_save_summary
""",
    ),
    (
        "Accepts MIN, MAX and PROD, and a `weight`; outside `run`, on several ranks, it warns that nothing is combined.",
        "ReplicaContext.all_reduce(reduce_op, value, options=None)",
    ),
    (
        "In TensorFlow below `tf.train`; objects have names (`root`, `kwargs`), a `path` is a folder (`file_prefix`, `save_path`), "
        "and other `options` do not exist.",
        """
Checkpoint(root=None, **kwargs)
Checkpoint.save(file_prefix, options=None)
Checkpoint.restore(save_path, options=None)
""",
    ),
    (
        "In TensorFlow below `tf.train`; a `step` is the `checkpoint_number`, and `keep_every` is a number of steps (`keep_checkpoint_every_n_hours`); "
        "there are no `checkpoint_name`, `step_counter`, `checkpoint_interval`, `init_fn`, `check_interval` and `options`.",
        """
CheckpointManager(checkpoint, directory, max_to_keep, keep_checkpoint_every_n_hours=None, checkpoint_name='ckpt', step_counter=None, checkpoint_interval=None, init_fn=None)
CheckpointManager.save(checkpoint_number=None, check_interval=True, options=None)
""",
    ),
    (
        "Has `signals` too, by default SIGTERM, SIGUSR1 and SIGUSR2; `termination_watcher_fn` is called after each step.",
        "experimental.TerminationConfig(termination_watcher_fn=None, exit_fn=None, grace_period=None, save_fn=None)",
    ),
    (
        "`checkpoint_or_manager` (`checkpoint_or_checkpoint_manager`) and `step_fn` (`fn`); `cluster_resolver` is not used. What stops a job is looked at "
        "after a step, and the time limit, of SLURM or MPISTRAT_TIME_LIMIT, is one.",
        """
experimental.PreemptionCheckpointHandler(cluster_resolver, checkpoint_or_checkpoint_manager, checkpoint_dir=None, termination_config=None)
experimental.PreemptionCheckpointHandler.run(fn, *args, **kwargs)
""",
    ),
    ("`merge_fn` runs once on every rank.", "ReplicaContext.merge_call(merge_fn, args=(), kwargs=None)"),
    (
        "Public here, as `update(variable, fn, args, kwargs)`; `var` is `variable`, and there is no `group`.",
        "ReplicaContext._update(var, fn, args, kwargs, group) -> ReplicaContext.update",
    ),
    (
        "Replicas may assign only equal values, which are compared; TensorFlow changes each copy independently.",
        "VariableAggregation.NONE",
    ),
    ("A value that all N replicas assign in `run` is summed N times.", "VariableAggregation.SUM"),
    ("Accepted, and means `AUTO`.", "experimental.CommunicationImplementation.RING"),
    (
        "One rank is one replica, so both modes mean one pipeline per rank.",
        """
InputReplicationMode.PER_WORKER
InputReplicationMode.PER_REPLICA
""",
    ),
    (
        "The rows of every global batch are split over the replicas; the numbers of rows differ by one at most.",
        "AutoShardPolicy.DATA",
    ),
    (
        "Has additional fields, and `timeout_seconds` applies under every strategy.",
        "experimental.CommunicationOptions(bytes_per_pack=0, timeout_seconds=None, implementation=AUTO)",
    ),
    (
        "Internal in TensorFlow; `devices`, `group_size` and `collective_keys` follow from the ranks.",
        "CollectiveAllReduce(devices, group_size, options, collective_keys=None)",
    ),
    ("The ranks of one node.", "MirroredStrategy(devices=None, cross_device_ops=None)"),
    (
        "All ranks of the job; a resolver only assigns roles to them.",
        "MultiWorkerMirroredStrategy(cluster_resolver=None, communication_options=None)",
    ),
    ("This rank alone; it ignores the others.", "OneDeviceStrategy(device)"),
    (
        "The ranks of one node; the variables are kept on one of them, and every rank has a read-only copy.",
        "experimental.CentralStorageStrategy(compute_devices=None, parameter_device=None)",
    ),
    (
        'The tasks are ranks of one MPI job; a variable goes to the server with the fewest bytes (`placement="even_bytes"`).',
        "experimental.ParameterServerStrategy(cluster_resolver, variable_partitioner=None)",
    ),
    (
        "The number of ranks: every rank is an input pipeline; TensorFlow has one for all replicas of a worker.",
        "InputContext.num_input_pipelines",
    ),
    ("The rank.", "InputContext.input_pipeline_id"),
    (
        "Not a tuple; has the `auto_shard_policy`, which is an option of the dataset in TensorFlow, and `virtual_replicas`.",
        "InputOptions(experimental_fetch_to_device=None, experimental_replication_mode=PER_WORKER, experimental_place_dataset_on_device=False, experimental_per_replica_buffer_size=1)",
    ),
    (
        "`next(iterator)`; inside `run` it raises `ValueError`, as there.",
        "DistributedIterator.next() -> DistributedIterator.__next__",
    ),
    ("Internal in TensorFlow; arithmetic outside `run` fails there too.", "PerReplica"),
    ("Internal in TensorFlow.", "Mirrored"),
    (
        "`tf.Variable` in TensorFlow, where the scope decides which class is created.",
        "Variable(initial_value, trainable, name, dtype, constraint, synchronization, aggregation, shape)",
    ),
    ("A property, not a method, and a view that changes with the variable.", "Variable.value"),
    ("Raises, as in TensorFlow without graphs; the message says how to save it.", "Variable.initial_value"),
    (
        "In `run` with NONE, values that differ raise on all replicas, where TensorFlow lets the copies diverge.",
        """
Variable.assign(value, use_locking=False, name=None, read_value=True)
Variable.assign_add(delta, use_locking=False, name=None, read_value=True)
Variable.assign_sub(delta, use_locking=False, name=None, read_value=True)
""",
    ),
    (
        "Works under every strategy, also in `run`; in TensorFlow only without a strategy.",
        """
Variable.scatter_nd_add(indices, updates, name=None)
Variable.scatter_nd_sub(indices, updates, name=None)
Variable.scatter_nd_min(indices, updates, name=None)
Variable.scatter_nd_max(indices, updates, name=None)
Variable.scatter_nd_update(indices, updates, name=None)
""",
    ),
    (
        "`cluster_spec` is called `cluster`.",
        """
is_chief(cluster_spec, task_type, task_id) -> cluster.is_chief
""",
    ),
    (
        "`rpc_layer`, `task_type` and `task_id` by keyword only.",
        "cluster_resolver.UnionResolver(*resolvers, rpc_layer, task_type, task_id)",
    ),
    (
        "MPI tells where the tasks are; never changes `CUDA_VISIBLE_DEVICES`.",
        "cluster_resolver.SlurmClusterResolver(jobs=None, port_base=8888, gpus_per_node=None, gpus_per_task=None, tasks_per_node=None, auto_set_gpu=True, rpc_layer='grpc')",
    ),
    (
        "For workers and servers; starting it is a collective call of all ranks, and `protocol` is only for `target`.",
        "Server(server_or_cluster_def, job_name=None, task_index=None, protocol=None, config=None, start=True)",
    ),
    ("Returns when the chief closes the strategy or ends.", "Server.join()"),
    ("A dict.", "Server.server_def"),
    (
        "`dataset` is called `dataset_or_dataset_fn`; a function that takes an argument gets an `InputContext`.",
        "experimental.coordinator.ClusterCoordinator.create_per_worker_dataset(dataset)",
    ),
    ("`nest` is called `val`, as in TensorFlow's code.", "experimental.coordinator.ClusterCoordinator.fetch(nest)"),
    (
        "Below `tf.errors` in TensorFlow; names the ranks that did not come, and is a `TimeoutError` too.",
        "DeadlineExceededError -> errors.DeadlineExceededError",
    ),
    (
        "Below `tf.errors` in TensorFlow.",
        """
UnavailableError -> errors.UnavailableError
CancelledError -> errors.CancelledError
""",
    ),
    ("Below `tf.errors` in TensorFlow; is a `StopIteration` too.", "OutOfRangeError -> errors.OutOfRangeError"),
    ("Below `tf.errors` in TensorFlow; is a `ValueError` too.", "InvalidArgumentError -> errors.InvalidArgumentError"),
)

# why, and the names that are not here
ABSENT: tuple[tuple[str, str], ...] = (
    (
        "A strategy consists of a communicator, a `CrossDeviceOps` and devices, which `StrategyExtended` takes.",
        "StrategyExtended._create_variable(next_creator, **kwargs)",
    ),
    ("There are no summaries; `should_save_summary` is true on the rank that writes logs.", "ReplicaContext.summary_recorded"),
    ("Removed from TensorFlow before its version 2.", "get_tower_context()"),
    (
        "Internal in TensorFlow; `CommunicationOptions(algorithm=…)` chooses here.",
        "AllReduceCrossDeviceOps(all_reduce_alg='nccl', num_packs=1)",
    ),
    ("Version 2 is here.", "v1.ParameterServerStrategy(cluster_resolver=None)"),
    (
        "For TPUs only.",
        """
TPUStrategy
TPUStrategy.experimental_assign_to_logical_device
TPUStrategy.experimental_split_to_logical_devices
TPUStrategy.experimental_replicate_to_logical_devices
cluster_resolver.TPUClusterResolver
experimental.PreemptionWatcher
experimental.PreemptionWatcher.preemption_message
experimental.PreemptionWatcher.block_until_worker_exit()
""",
    ),
    (
        "For graphs and sessions, which do not exist here.",
        """
Variable.initialized_value()
Variable.initializer
Variable.eval(session=None)
Variable.load(value, session=None)
""",
    ),
    ("Deprecated in TensorFlow; `assign_add(1)` counts.", "Variable.count_up_to(limit)"),
    ("Use `id(variable)` as a key, as long as the variable exists.", "Variable.ref()"),
    ("A variable always has the shape of its initial value.", "Variable.set_shape(shape)"),
    ("`scatter_nd_update` takes indices of several axes.", "Variable.batch_scatter_update(sparse_delta)"),
    (
        "Queries a cloud service; here MPI defines the cluster.",
        """
cluster_resolver.KubernetesClusterResolver
cluster_resolver.GCEClusterResolver
cluster_resolver.SageMakerClusterResolver
""",
    ),
    (
        "A server needs a chief, and both are ranks of one MPI job: `mpistrat run -n 3`.",
        "Server.create_local_server(config=None, start=True)",
    ),
)
