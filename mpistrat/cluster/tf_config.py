"""TFConfigClusterResolver: the cluster in the environment variable TF_CONFIG."""

from __future__ import annotations

import json
import os
from typing import Any

from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.errors import InvalidArgumentError

__all__ = ["TFConfigClusterResolver"]

_EXAMPLE = '{"cluster": {"worker": ["a:8888", "b:8888"]}, "task": {"type": "worker", "index": 0}}'


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster, and which task this process is, from ``TF_CONFIG``; if that is not set, the cluster is empty.

    Parameters
    ----------
    task_type : str, optional
        The job of this process; by default the one in ``TF_CONFIG``, as for the arguments that follow.
    task_id : int, optional
        The index of this process in its job.
    rpc_layer : str, optional
        The protocol that `master` puts before an address.
    environment : str, optional
        The environment that the cluster runs in.

    Raises
    ------
    InvalidArgumentError
        If ``TF_CONFIG`` is not valid JSON, or has another structure.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        config = _read()
        task = _part(config, "task")
        self.task_type = _text(task.get("type")) if task_type is None else task_type
        self.task_id = _index(task.get("index") if task_id is None else task_id)
        self.rpc_layer = _text(config.get("rpc_layer")) if rpc_layer is None else rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster in the present value of ``TF_CONFIG``.

        Raises
        ------
        InvalidArgumentError
            If ``TF_CONFIG`` is not valid JSON, or has another structure.
        """
        return ClusterSpec(_part(_read(), "cluster"))

    @property
    def environment(self) -> str:
        """The environment that the cluster runs in."""
        return str(_read().get("environment", "")) if self._environment is None else self._environment

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the ``session_master`` of ``TF_CONFIG``, or the address of a task; empty if the cluster has only one.

        Raises
        ------
        InvalidArgumentError
            If the cluster has no such task.
        """
        session_master = _read().get("session_master")
        if session_master is not None:
            return str(session_master)
        spec = self.cluster_spec()
        if sum(spec.num_tasks(job) for job in spec.jobs) < 2:
            return ""
        return super().master(task_type, task_id, rpc_layer)


def _read() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG", "").strip() or "{}"
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"TF_CONFIG={text!r} is not valid JSON ({error}); accepted is {_EXAMPLE}") from None
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"TF_CONFIG={text!r} is not a JSON object; accepted is {_EXAMPLE}")
    return config


def _part(config: dict[str, Any], key: str) -> dict[str, Any]:
    part = config.get(key) or {}
    if not isinstance(part, dict):
        raise InvalidArgumentError(f"{key!r} of TF_CONFIG must be an object; got {part!r}; accepted is {_EXAMPLE}")
    return part


def _text(value: Any) -> str | None:
    """Return a name that may have been written as a number."""
    return None if value is None else str(value)


def _index(value: Any) -> int | None:
    if value is None:
        return None
    try:
        number = int(value)
        if isinstance(value, float) and value != number:
            raise ValueError("a fraction")
        return number
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"the task index must be a number; got {value!r}; TF_CONFIG is as in {_EXAMPLE}") from None
