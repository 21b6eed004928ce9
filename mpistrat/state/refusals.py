"""Errors for operations that a variable does not support, each with an incorrect and a correct example."""

from __future__ import annotations

from mpistrat.errors import AgreementError, InvalidArgumentError

__all__ = [
    "differing",
    "no_aggregation",
    "no_scatter",
    "no_such_aggregation",
    "not_kept",
    "sum_outside_run",
    "unreadable",
    "varies",
]

_WITH_AGGREGATION = (
    "    correct:    mpistrat.Variable(…, aggregation=mpistrat.VariableAggregation.MEAN); SUM, ONLY_FIRST_REPLICA too"
)


def varies(variable: object, method: str) -> TypeError:
    """Return the error for assigning a per-replica value."""
    return TypeError(
        f"{variable!r}.{method} got a per-replica value, which differs between replicas.\n"
        f"    incorrect:  variable.{method}(strategy.run(fn))\n"
        f'    correct:    variable.{method}(strategy.reduce("mean", strategy.run(fn), axis=None))'
    )


def no_aggregation(variable: object, method: str, num_replicas: int) -> InvalidArgumentError:
    """Return the error for assigning inside ``strategy.run``, under central storage, with aggregation NONE."""
    return InvalidArgumentError(f"{_undefined(variable, num_replicas)}\n{_ways_out(method)}")


def differing(variable: object, method: str, num_replicas: int, found: AgreementError) -> AgreementError:
    """Return the error for replicas that assign different values with aggregation NONE."""
    return AgreementError(f"{_undefined(variable, num_replicas)} Equal values are accepted; {found}\n{_ways_out(method)}")


def not_kept(variable: object) -> RuntimeError:
    """Return the error for reading the initial value, which would take as much memory as the variable."""
    return RuntimeError(
        f"{variable!r} does not keep its initial value.\n"
        "    incorrect:  variable.initial_value\n"
        "    correct:    initial_value = variable.numpy(), right after making the variable"
    )


def unreadable(variable: object, num_replicas: int) -> InvalidArgumentError:
    """Return the error for reading a variable synchronized ON_READ, outside ``strategy.run``, with aggregation NONE."""
    return InvalidArgumentError(
        f"{_undefined(variable, num_replicas)}\n"
        "    incorrect:  np.asarray(variable), outside strategy.run\n"
        f"{_WITH_AGGREGATION}\n"
        "    correct:    strategy.run(lambda: variable.numpy()), the array of each replica"
    )


def sum_outside_run(variable: object, method: str) -> InvalidArgumentError:
    """Return the error for adding to a variable, outside ``strategy.run``, whose arrays are summed when it is read."""
    return InvalidArgumentError(
        f"{variable!r}.{method} outside strategy.run is undefined: the replicas' arrays are summed when it is read.\n"
        f"    incorrect:  variable.{method}(delta)\n"
        f"    correct:    def step(): variable.{method}(delta), then strategy.run(step)\n"
        "    correct:    variable.assign(value), which gives each replica its part"
    )


def no_scatter(variable: object, method: str) -> NotImplementedError:
    """Return the error for a scatter update of a variable synchronized ON_READ."""
    return NotImplementedError(
        f"{variable!r}.{method} is not defined for variables that are synchronized ON_READ.\n"
        f"    incorrect:  mpistrat.Variable(…, synchronization=mpistrat.VariableSynchronization.ON_READ).{method}(slices)\n"
        f"    correct:    mpistrat.Variable(…, aggregation=mpistrat.VariableAggregation.SUM).{method}(slices)\n"
        "    correct:    def step(): variable.assign_add(slices.to_dense())"
    )


def no_such_aggregation(variable: object, method: str) -> NotImplementedError:
    """Return the error for a scatter update inside ``strategy.run`` for which SUM and MEAN are not defined."""
    return NotImplementedError(
        f"{variable!r}.{method} inside strategy.run needs aggregation ONLY_FIRST_REPLICA or NONE: rows are compared or "
        "replaced, not summed.\n"
        f"    incorrect:  def step(): variable.{method}(slices)\n"
        f"    correct:    mpistrat.Variable(…, aggregation=mpistrat.VariableAggregation.ONLY_FIRST_REPLICA).{method}(slices)\n"
        f"    correct:    variable.{method}(slices) outside strategy.run"
    )


def _ways_out(method: str) -> str:
    return (
        f"    incorrect:  def step(): variable.{method}(value)\n"
        f"{_WITH_AGGREGATION}\n"
        '    correct:    def step(): ctx.update(variable, lambda old, new: new, (ctx.all_reduce("mean", value),))\n'
        f"    correct:    variable.{method}(value) outside strategy.run"
    )


def _undefined(variable: object, num_replicas: int) -> str:
    return f"{variable!r} has aggregation NONE, so the values of {num_replicas} replicas cannot be combined."
