"""Examples for error messages about a call in the wrong context: an incorrect line, and the correct one."""

from __future__ import annotations

# method -> (incorrect, correct)
ADVICE = {
    # methods of a strategy and of its extended part, called inside strategy.run
    "reduce": (
        'def step(): return strategy.reduce("sum", value, axis=None)',
        'def step(): return mpistrat.get_replica_context().all_reduce("sum", value)',
    ),
    "gather": (
        "def step(): return strategy.gather(value, axis=0)",
        "def step(): return mpistrat.get_replica_context().all_gather(value, axis=0)",
    ),
    "broadcast": (
        "def step(): return strategy.broadcast(value)",
        "def step(): return mpistrat.get_replica_context().broadcast(value)",
    ),
    "experimental_local_results": (
        "def step(): return strategy.experimental_local_results(value)",
        "strategy.experimental_local_results(strategy.run(step))",
    ),
    "experimental_distribute_dataset": (
        "def step(): for batch in strategy.experimental_distribute_dataset(dataset): …",
        "for batch in strategy.experimental_distribute_dataset(dataset): strategy.run(step, args=(batch,))",
    ),
    "distribute_datasets_from_function": (
        "def step(): for batch in strategy.distribute_datasets_from_function(dataset_fn): …",
        "for batch in strategy.distribute_datasets_from_function(dataset_fn): strategy.run(step, args=(batch,))",
    ),
    "experimental_distribute_values_from_function": (
        "def step(): value = strategy.experimental_distribute_values_from_function(value_fn)",
        "strategy.run(step, args=(strategy.experimental_distribute_values_from_function(value_fn),))",
    ),
    "close": ("def step(): strategy.close()", "strategy.run(step); strategy.close()"),
    "reduce_to": (
        'def step(): return strategy.extended.reduce_to("sum", value, destinations)',
        'def step(): return mpistrat.get_replica_context().all_reduce("sum", value)',
    ),
    "batch_reduce_to": (
        'def step(): return strategy.extended.batch_reduce_to("sum", [(value, value), (other, other)])',
        'def step(): return mpistrat.get_replica_context().all_reduce("sum", [value, other])',
    ),
    "broadcast_to": (
        "def step(): return strategy.extended.broadcast_to(value, destinations)",
        "def step(): return mpistrat.get_replica_context().broadcast(value)",
    ),
    "update_non_slot": (
        "def step(): strategy.extended.update_non_slot(devices, fn)",
        "def step(): context.merge_call(lambda strategy: strategy.extended.update_non_slot(devices, fn))",
    ),
    "read_var": ("def step(): return strategy.extended.read_var(variable)", "def step(): return variable.value"),
    "colocate_vars_with": (
        "with strategy.extended.colocate_vars_with(variable): other = mpistrat.Variable(value)",
        "with strategy.scope(), strategy.extended.colocate_vars_with(variable): other = mpistrat.Variable(value)",
    ),
    # methods of CrossDeviceOps, called inside strategy.run
    "ops.reduce": (
        'def step(): return ops.reduce("sum", value, destinations)',
        'def step(): return mpistrat.get_replica_context().all_reduce("sum", value); or ops.reduce(…) in strategy.scope()',
    ),
    "ops.batch_reduce": (
        'def step(): return ops.batch_reduce("sum", [(value, destinations), (other, destinations)])',
        'def step(): return mpistrat.get_replica_context().all_reduce("sum", [value, other]); or ops.batch_reduce(…) in '
        "strategy.scope()",
    ),
    "ops.broadcast": (
        "def step(): return ops.broadcast(array, destinations)",
        "with strategy.scope(): ops.broadcast(array, destinations)",
    ),
    # methods of a replica context, called outside its run
    "ctx.all_reduce": ('with strategy.scope(): ctx.all_reduce("sum", value)', 'strategy.reduce("sum", value, axis=None)'),
    "ctx.start_all_reduce": (
        'with strategy.scope(): ctx.start_all_reduce("sum", value)',
        'strategy.reduce("sum", value, axis=None)',
    ),
    "ctx.all_gather": ("with strategy.scope(): ctx.all_gather(value, axis=0)", "strategy.gather(value, axis=0)"),
    "ctx.broadcast": ("with strategy.scope(): ctx.broadcast(value)", "strategy.broadcast(value)"),
    "ctx.reduce_scatter": (
        'with strategy.scope(): ctx.reduce_scatter("sum", value)',
        'strategy.run(lambda value: mpistrat.get_replica_context().reduce_scatter("sum", value), args=(value,))',
    ),
    "ctx.all_to_all": (
        "with strategy.scope(): ctx.all_to_all(values)",
        "strategy.run(lambda values: mpistrat.get_replica_context().all_to_all(values), args=(values,))",
    ),
    "ctx.barrier": (
        "with strategy.scope(): ctx.barrier()",
        "strategy.run(lambda: mpistrat.get_replica_context().barrier())",
    ),
    "ctx.merge_call": ("def merge_fn(strategy): ctx.merge_call(other_fn)", "def merge_fn(strategy): other_fn(strategy)"),
    "ctx.update": ("with strategy.scope(): ctx.update(variable, fn)", "with strategy.scope(): variable.assign(value)"),
    "ctx.__enter__": ("strategy.run(fn), where fn calls strategy.run(other)", "strategy.run(fn), where fn calls other()"),
}
