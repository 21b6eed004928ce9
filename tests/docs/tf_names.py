# ruff: noqa: E501 - a name is not cut, with all arguments of TensorFlow's
"""The names of tf.distribute here: the source of docs/reference/tf-names.md, which lists those that differ.

A name is spelt as in TensorFlow without ``tf.distribute.``, with the arguments of a call. Behind an arrow is where it is below
``mpistrat``, if under another name. An argument that ours does not take, or takes under another name, is named in the remark,
in backticks.
"""

import re
from typing import NamedTuple


class Name(NamedTuple):
    """A name of TensorFlow's: its spelling with arguments, where it is below ``mpistrat``, and what differs."""

    spelling: str
    path: str
    remark: str = ""

    @property
    def arguments(self) -> list[str]:
        inside = self.spelling.partition("(")[2].removesuffix(")")
        return [part.partition("=")[0].strip() for part in inside.split(",") if part.strip()]


def _name(text: str, remark: str = "") -> Name:
    spelling, _, path = text.strip().partition(" -> ")
    return Name(spelling, path or spelling.partition("(")[0], remark)


def _members(text: str) -> list[Name]:
    """Return the names of a text in which each class, or module, comes before its members."""
    found = []
    for owner, members in re.findall(r"^([\w.]*):((?:.|\n    )*)", text, re.MULTILINE):
        found += [_name(f"{owner}.{member.strip()}".lstrip(".")) for member in members.split(";")]
    return found


def _remarked(text: str) -> list[tuple[str, list[Name]]]:
    """Return what is remarked in a text, each with the names above it."""
    found = []
    for names, lines in re.findall(r"((?:^\S.*\n)+)((?:^    .*\n)+)", text, re.MULTILINE):
        remark = " ".join(lines.split())
        found.append((remark, [_name(name, remark) for name in names.splitlines()]))
    return found


# in the module itself, and then those of each class
SAME = _members("""
: get_strategy(); has_strategy(); get_replica_context(); in_cross_replica_context(); experimental_set_strategy(strategy);
    get_loss_reduction(); enter_or_assert_strategy(strategy) -> context.stack.enter_or_assert_strategy;
    get_update_replica_id() -> context.stack.get_update_replica_id; Strategy(extended);
    RunOptions(experimental_enable_dynamic_batch_size, experimental_bucketizing_dynamic_shape, experimental_xla_options);
    ReplicaContext(strategy, replica_id_in_sync_group); ReduceOp; VariableSynchronization; VariableAggregation;
    InputReplicationMode; AutoShardPolicy; CrossDeviceOps(); ReductionToOneDevice(reduce_to_device=None, accumulation_fn=None);
    NcclAllReduce(num_packs=1); HierarchicalCopyAllReduce(num_packs=1);
    InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1); DistributedDataset; DistributedIterator;
    DistributedValues; IndexedSlices(values, indices, dense_shape=None); ClusterSpec(cluster)
experimental.PreemptionCheckpointHandler: save_checkpoint_if_preempted(*args, **kwargs); watch_preemption_scope();
    total_run_calls
Strategy: extended; num_replicas_in_sync; cluster_resolver; scope();
    experimental_distribute_datasets_from_function(dataset_fn, options=None);
    experimental_distribute_values_from_function(value_fn); unwrap(value); group(value, name=None);
    configure(session_config=None, cluster_spec=None, task_type=None, task_id=None); update_config_proto(config_proto);
    experimental_run(fn, input_iterator=None); make_dataset_iterator(dataset);
    make_input_fn_iterator(input_fn, replication_mode); colocate_vars_with(colocate_with_variable)
StrategyExtended: value_container(value); variable_created_in_scope(v); colocate_vars_with(colocate_with_variable);
    experimental_require_static_shapes; broadcast_to(tensor, destinations); call_for_each_replica(fn, args=(), kwargs=None);
    read_var(v); update_non_slot(colocate_with, fn, args=(), kwargs=None, group=True); non_slot_devices(var_list);
    experimental_between_graph; experimental_should_init
ReplicaContext: replica_id_in_sync_group; num_replicas_in_sync; strategy; devices; all_gather(value, axis, options=None);
    all_reduce(reduce_op, value, experimental_hints=None)
ReduceOp: SUM; MEAN; from_variable_aggregation(aggregation)
VariableSynchronization: AUTO; NONE; ON_WRITE; ON_READ
VariableAggregation: MEAN; ONLY_FIRST_REPLICA
experimental: CommunicationImplementation; CollectiveCommunication; CollectiveHints(bytes_per_pack=0, timeout_seconds=None);
    MultiWorkerMirroredStrategy(communication=AUTO, cluster_resolver=None);
    ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1); ShardedVariable
experimental.CommunicationImplementation: AUTO; NCCL
AutoShardPolicy: OFF; AUTO; FILE; HINT
experimental.CommunicationOptions: bytes_per_pack; timeout_seconds; implementation; merge(other)
CrossDeviceOps: reduce(reduce_op, per_replica_value, destinations, options=None);
    batch_reduce(reduce_op, value_destination_pairs, options=None); broadcast(tensor, destinations);
    reduce_implementation(reduce_op, per_replica_value, destinations, options);
    batch_reduce_implementation(reduce_op, value_destination_pairs, options); broadcast_implementation(tensor, destinations);
    _gather_implementation(per_replica_value, destinations, axis, options) -> CrossDeviceOps.gather_implementation
InputContext: num_replicas_in_sync; get_per_replica_batch_size(global_batch_size)
experimental.ValueContext: replica_id_in_sync_group; num_replicas_in_sync
InputOptions: experimental_fetch_to_device; experimental_replication_mode; experimental_place_dataset_on_device;
    experimental_per_replica_buffer_size
DistributedDataset: element_spec
DistributedIterator: get_next(); get_next_as_optional(); element_spec
Variable: name; dtype; shape; synchronization; aggregation; trainable; distribute_strategy; read_value(); numpy();
    sparse_read(indices, name=None); gather_nd(indices, name=None); constraint; is_initialized();
    scatter_add(sparse_delta, use_locking=False, name=None); scatter_sub(sparse_delta, use_locking=False, name=None);
    scatter_div(sparse_delta, use_locking=False, name=None); scatter_mul(sparse_delta, use_locking=False, name=None);
    scatter_min(sparse_delta, use_locking=False, name=None); scatter_max(sparse_delta, use_locking=False, name=None);
    scatter_update(sparse_delta, use_locking=False, name=None)
IndexedSlices: values; indices; dense_shape
ClusterSpec: as_dict(); jobs; num_tasks(job_name); task_indices(job_name); task_address(job_name, task_index);
    job_tasks(job_name)
cluster_resolver: ClusterResolver;
    SimpleClusterResolver(cluster_spec, master='', task_type=None, task_id=None, environment='', num_accelerators=None, rpc_layer=None);
    TFConfigClusterResolver(task_type=None, task_id=None, rpc_layer=None, environment=None)
cluster_resolver.ClusterResolver: cluster_spec(); master(task_type=None, task_id=None, rpc_layer=None);
    num_accelerators(task_type=None, task_id=None); task_type; task_id; rpc_layer; environment
cluster_resolver.SlurmClusterResolver: get_task_info()
Server: start(); target
experimental.partitioners: Partitioner; FixedShardsPartitioner(num_shards);
    MinSizePartitioner(min_shard_bytes, max_shards=1, bytes_per_string=16);
    MaxSizePartitioner(max_shard_bytes, max_shards=None, bytes_per_string=16)
experimental.ShardedVariable: variables
experimental.coordinator: ClusterCoordinator(strategy); PerWorkerValues; RemoteValue
experimental.coordinator.ClusterCoordinator: schedule(fn, args=None, kwargs=None); join(); done(); strategy
experimental.coordinator.RemoteValue: fetch(); get()
""")

# names, and below them what differs
DIFFERENT = _remarked("""
Strategy.run(fn, args=(), kwargs=None, options=None)
    Every rank calls `fn` once, for its own replica.
Strategy.reduce(reduce_op, value, axis)
    Accepts nested values, MIN, MAX and PROD. A value that is not distributed is what each rank passes: the MEAN of ranks that
    pass different ones is their mean, where TensorFlow returns its own to each. Over an axis, SUM counts booleans.
Strategy.gather(value, axis)
    Accepts nested values, and values that are not per-replica.
Strategy.experimental_distribute_dataset(dataset, options=None)
    Global batches are split over all replicas, each of which is a rank of its own.
Strategy.distribute_datasets_from_function(dataset_fn, options=None)
    Every rank is an input pipeline and calls `dataset_fn`; in TensorFlow every worker does.
Strategy.experimental_local_results(value)
DistributedValues.values
Variable.values
    A tuple of one: a rank holds one replica.
Strategy.experimental_make_numpy_dataset(numpy_input, session=None)
    Needs the `batch_size` too: datasets consist of batches here.
Strategy.broadcast(tensor, destinations=None)
    `tensor` is called `value`, and all replicas receive it: there is a `root` instead of `destinations`.
StrategyExtended(container_strategy)
    Takes a `communicator` instead of `container_strategy`; the strategy is set later.
StrategyExtended.reduce_to(reduce_op, value, destinations, options=None)
StrategyExtended.batch_reduce_to(reduce_op, value_destination_pairs, options=None)
    Accepts MIN, MAX and PROD too; a value that is not distributed is taken as by `reduce()`.
StrategyExtended.update(var, fn, args=(), kwargs=None, group=True)
    Components of an argument that differ raise from the next collective, unless the variable is ON_READ.
StrategyExtended.worker_devices
    The device of this rank; of a strategy on one node those of all its ranks.
StrategyExtended.parameter_devices
    As `worker_devices`; of `CentralStorageStrategy` the rank that keeps the variables.
StrategyExtended.should_checkpoint
StrategyExtended.should_save_summary
    True on one rank: the chief, or replica 0.
ReplicaContext.all_reduce(reduce_op, value, options=None)
    Accepts MIN, MAX and PROD, and a `weight`; outside `run`, on several ranks, it warns that nothing is combined.
Checkpoint(root=None, **kwargs)
Checkpoint.save(file_prefix, options=None)
Checkpoint.restore(save_path, options=None)
    In TensorFlow below `tf.train`; objects have names (`root`, `kwargs`), a `path` is a folder (`file_prefix`, `save_path`),
    and other `options` do not exist.
CheckpointManager(checkpoint, directory, max_to_keep, keep_checkpoint_every_n_hours=None, checkpoint_name='ckpt', step_counter=None, checkpoint_interval=None, init_fn=None)
CheckpointManager.save(checkpoint_number=None, check_interval=True, options=None)
    In TensorFlow below `tf.train`; a `step` is the `checkpoint_number`, and `keep_every` is a number of steps
    (`keep_checkpoint_every_n_hours`); there are no `checkpoint_name`, `step_counter`, `checkpoint_interval`, `init_fn`,
    `check_interval` and `options`.
experimental.TerminationConfig(termination_watcher_fn=None, exit_fn=None, grace_period=None, save_fn=None)
    Has `signals` too, by default SIGTERM, SIGUSR1 and SIGUSR2; `termination_watcher_fn` is called after each step.
experimental.PreemptionCheckpointHandler(cluster_resolver, checkpoint_or_checkpoint_manager, checkpoint_dir=None, termination_config=None)
experimental.PreemptionCheckpointHandler.run(fn, *args, **kwargs)
    `checkpoint_or_manager` (`checkpoint_or_checkpoint_manager`) and `step_fn` (`fn`); `cluster_resolver` is not used. What
    stops a job is looked at after a step, and the time limit, of SLURM or MPISTRAT_TIME_LIMIT, is one.
ReplicaContext.merge_call(merge_fn, args=(), kwargs=None)
    `merge_fn` runs once on every rank.
ReplicaContext._update(var, fn, args, kwargs, group) -> ReplicaContext.update
    Public here, as `update(variable, fn, args, kwargs)`; `var` is `variable`, and there is no `group`.
VariableAggregation.NONE
    Replicas may assign only equal values, which are compared; TensorFlow changes each copy independently.
VariableAggregation.SUM
    A value that all N replicas assign in `run` is summed N times.
experimental.CommunicationImplementation.RING
    Accepted, and means `AUTO`.
InputReplicationMode.PER_WORKER
InputReplicationMode.PER_REPLICA
    One rank is one replica, so both modes mean one pipeline per rank.
AutoShardPolicy.DATA
    The rows of every global batch are split over the replicas; the numbers of rows differ by one at most.
experimental.CommunicationOptions(bytes_per_pack=0, timeout_seconds=None, implementation=AUTO)
    Has additional fields, and `timeout_seconds` applies under every strategy.
CollectiveAllReduce(devices, group_size, options, collective_keys=None)
    Internal in TensorFlow; `devices`, `group_size` and `collective_keys` follow from the ranks.
MirroredStrategy(devices=None, cross_device_ops=None)
    The ranks of one node.
MultiWorkerMirroredStrategy(cluster_resolver=None, communication_options=None)
    All ranks of the job; a resolver only assigns roles to them.
OneDeviceStrategy(device)
    This rank alone; it ignores the others.
experimental.CentralStorageStrategy(compute_devices=None, parameter_device=None)
    The ranks of one node; the variables are kept on one of them, and every rank has a read-only copy.
experimental.ParameterServerStrategy(cluster_resolver, variable_partitioner=None)
    The tasks are ranks of one MPI job; a variable goes to the server with the fewest bytes.
InputContext.num_input_pipelines
    The number of ranks: every rank is an input pipeline; TensorFlow has one for all replicas of a worker.
InputContext.input_pipeline_id
    The rank.
InputOptions(experimental_fetch_to_device=None, experimental_replication_mode=PER_WORKER, experimental_place_dataset_on_device=False, experimental_per_replica_buffer_size=1)
    Not a tuple; has the `auto_shard_policy`, which is an option of the dataset in TensorFlow, and `virtual_replicas`.
DistributedIterator.next() -> DistributedIterator.__next__
    `next(iterator)`; inside `run` it raises `ValueError`, as there.
PerReplica
    Internal in TensorFlow; arithmetic outside `run` fails there too.
Mirrored
    Internal in TensorFlow.
Variable(initial_value, trainable, name, dtype, constraint, synchronization, aggregation, shape)
    `tf.Variable` in TensorFlow, where the scope decides which class is created.
Variable.value
    A property, not a method, and a view that changes with the variable.
Variable.initial_value
    Raises, as in TensorFlow without graphs; the message says how to save it.
Variable.assign(value, use_locking=False, name=None, read_value=True)
Variable.assign_add(delta, use_locking=False, name=None, read_value=True)
Variable.assign_sub(delta, use_locking=False, name=None, read_value=True)
    In `run` with NONE, values that differ raise on all replicas, where TensorFlow lets the copies diverge.
is_chief(cluster_spec, task_type, task_id) -> cluster.is_chief
    `cluster_spec` is called `cluster`.
cluster_resolver.UnionResolver(*resolvers, rpc_layer, task_type, task_id)
    `rpc_layer`, `task_type` and `task_id` by keyword only.
cluster_resolver.SlurmClusterResolver(jobs=None, port_base=8888, gpus_per_node=None, gpus_per_task=None, tasks_per_node=None, auto_set_gpu=True, rpc_layer='grpc')
    MPI tells where the tasks are; never changes `CUDA_VISIBLE_DEVICES`.
Server(server_or_cluster_def, job_name=None, task_index=None, protocol=None, config=None, start=True)
    For workers and servers; starting it is a collective call of all ranks, and `protocol` is only for `target`.
Server.join()
    Returns when the chief closes the strategy or ends.
Server.server_def
    A dict.
experimental.coordinator.ClusterCoordinator.create_per_worker_dataset(dataset)
    `dataset` is called `dataset_or_dataset_fn`; a function that takes an argument gets an `InputContext`.
experimental.coordinator.ClusterCoordinator.fetch(nest)
    `nest` is called `val`, as in TensorFlow's code.
DeadlineExceededError -> errors.DeadlineExceededError
    Below `tf.errors` in TensorFlow; names the ranks that did not come, and is a `TimeoutError` too.
UnavailableError -> errors.UnavailableError
CancelledError -> errors.CancelledError
OutOfRangeError -> errors.OutOfRangeError
InvalidArgumentError -> errors.InvalidArgumentError
    Below `tf.errors` in TensorFlow; a built-in exception, too.
""")

# names that are not here, and below them why
ABSENT = _remarked("""
StrategyExtended._create_variable(next_creator, **kwargs)
    A strategy consists of a communicator, a `CrossDeviceOps` and devices, which `StrategyExtended` takes.
ReplicaContext.summary_recorded
    There are no summaries; `should_save_summary` is true on the rank that writes logs.
get_tower_context()
    Removed from TensorFlow before its version 2.
AllReduceCrossDeviceOps(all_reduce_alg='nccl', num_packs=1)
    Internal in TensorFlow; `experimental.CommunicationOptions(algorithm=…)` chooses here.
v1.ParameterServerStrategy(cluster_resolver=None)
    Version 2 is here.
TPUStrategy
TPUStrategy.experimental_assign_to_logical_device
TPUStrategy.experimental_split_to_logical_devices
TPUStrategy.experimental_replicate_to_logical_devices
cluster_resolver.TPUClusterResolver
experimental.PreemptionWatcher
experimental.PreemptionWatcher.preemption_message
experimental.PreemptionWatcher.block_until_worker_exit()
    For TPUs only.
Variable.initialized_value()
Variable.initializer
Variable.eval(session=None)
Variable.load(value, session=None)
    For graphs and sessions, which do not exist here.
Variable.count_up_to(limit)
    Deprecated in TensorFlow; `assign_add(1)` counts.
Variable.ref()
    Use `id(variable)` as a key, as long as the variable exists.
Variable.set_shape(shape)
    A variable always has the shape of its initial value.
Variable.batch_scatter_update(sparse_delta)
Variable.scatter_nd_add(indices, updates, name=None)
Variable.scatter_nd_sub(indices, updates, name=None)
Variable.scatter_nd_min(indices, updates, name=None)
Variable.scatter_nd_max(indices, updates, name=None)
Variable.scatter_nd_update(indices, updates, name=None)
    In TensorFlow for variables of no strategy; `scatter_add` and the others change rows, `assign` all.
cluster_resolver.KubernetesClusterResolver
cluster_resolver.GCEClusterResolver
cluster_resolver.SageMakerClusterResolver
    Queries a cloud service; here MPI defines the cluster.
Server.create_local_server(config=None, start=True)
    A server needs a chief, and both are ranks of one MPI job: `mpistrat run -n 3`.
""")
