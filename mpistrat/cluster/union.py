"""UnionResolver: several clusters as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.errors import InvalidArgumentError

__all__ = ["UnionResolver"]

_KEYWORDS = ("rpc_layer", "task_type", "task_id")


class UnionResolver(ClusterResolver):
    """Joins the clusters of several resolvers; everything else comes from the first one.

    If several resolvers have a job of the same name, its lists of addresses are concatenated; if one of them gives a dict, each
    task index may occur only once.

    Parameters
    ----------
    *resolvers : ClusterResolver
        At least one.
    **keywords : str or int
        `rpc_layer`, `task_type` and `task_id` replace those of the first resolver.

    Raises
    ------
    InvalidArgumentError
        If there is no resolver, or another keyword.
    TypeError
        If one is not a ClusterResolver.
    """

    def __init__(self, *resolvers: ClusterResolver, **keywords: Any) -> None:
        unknown = sorted(set(keywords) - set(_KEYWORDS))
        if unknown:
            raise InvalidArgumentError(f"UnionResolver takes the keywords {', '.join(_KEYWORDS)}; got {', '.join(unknown)}")
        if not resolvers:
            raise InvalidArgumentError("UnionResolver needs at least one ClusterResolver; got none")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"UnionResolver joins ClusterResolvers; got {type(resolver).__name__}")
        self._resolvers = resolvers
        for name in _KEYWORDS:
            given = keywords.get(name)
            setattr(self, name, getattr(resolvers[0], name) if given is None else given)

    def cluster_spec(self) -> ClusterSpec:
        """Return a new ClusterSpec with the jobs of all resolvers.

        Raises
        ------
        KeyError
            If two resolvers give the same task of a job.
        """
        specs = [resolver.cluster_spec() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for spec in specs for job in spec.jobs)
        return ClusterSpec({job: _joined(job, [spec.as_dict()[job] for spec in specs if job in spec.jobs]) for job in jobs})

    @property
    def environment(self) -> str:
        """The environment of the first resolver."""
        return self._resolvers[0].environment

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task of any cluster; if none is asked for, the `master` of the first resolver.

        Raises
        ------
        InvalidArgumentError
            If there is no such task.
        """
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return self._resolvers[0].master(rpc_layer=self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the accelerators that the first resolver gives."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


def _joined(job: str, parts: Iterable[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    """Return the tasks of a job that is in several clusters."""
    parts = list(parts)
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    tasks: dict[int, str] = {}
    for part in parts:
        for index, address in part.items() if isinstance(part, dict) else enumerate(part):
            if index in tasks:
                raise KeyError(f"task {index} of job {job!r} is both {tasks[index]} and {address}")
            tasks[index] = address
    return tasks
