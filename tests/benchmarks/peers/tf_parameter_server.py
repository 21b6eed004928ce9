"""TensorFlow's parameter servers, in processes of one host that talk by gRPC: the same as `parameter_server_ranks`."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

from scheduling import BATCH, ROWS, WIDTH, functions, rate


def main() -> None:
    """Be a server, if ``sys.argv`` says which; else start one ps and the workers, and measure."""
    if len(sys.argv) == 4:
        _serve(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
        return
    num_workers, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    ports, jobs = iter(_free_ports(num_workers + 2)), {"chief": 1, "ps": 1, "worker": num_workers}
    cluster = {job: [f"localhost:{next(ports)}" for _ in range(count)] for job, count in jobs.items()}
    servers = [
        subprocess.Popen([sys.executable, __file__, json.dumps(cluster), job, str(index)])
        for job in ("ps", "worker")
        for index in range(len(cluster[job]))
    ]
    try:
        _measure(cluster, num_workers, cases)
    finally:
        for server in servers:
            server.kill()
    os._exit(0)  # the coordinator's threads would look for the servers


def _serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    import tensorflow as tf

    tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc").join()


def _measure(cluster: dict[str, list[str]], num_workers: int, cases: list[list[int]]) -> None:
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.experimental.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
    found: dict[str, float] = {}

    def rate_of(fn: Any, times: int) -> float:
        return rate(coordinator, fn, times, num_workers, tf.constant)

    def functions_on(variable: Any) -> tuple[Any, Any]:
        @tf.function
        def pull(times: Any) -> Any:
            total = 0.0
            for _ in tf.range(times):
                tf.autograph.experimental.set_loop_options(parallel_iterations=1)
                total += variable.read_value()[0]
            return total

        @tf.function
        def push(times: Any) -> None:
            delta = tf.ones(variable.shape)
            for _ in tf.range(times):
                tf.autograph.experimental.set_loop_options(parallel_iterations=1)
                variable.assign_add(delta)

        return pull, push

    for nbytes, times in cases:
        with strategy.scope():
            variable = tf.Variable(tf.zeros(nbytes // 4))
        pull, push = functions_on(variable)
        found |= {f"pull {nbytes}": rate_of(pull, times), f"push {nbytes}": rate_of(push, times)}
        assert bool(tf.reduce_all(variable == float((times + 3) * num_workers))), "a push is missing"
    if cases:
        with strategy.scope():
            table = tf.Variable(tf.zeros((ROWS, WIDTH)))

        @tf.function
        def pull_rows(times: Any) -> Any:
            total = 0.0
            for _ in tf.range(times):
                tf.autograph.experimental.set_loop_options(parallel_iterations=1)
                total += tf.gather(table, tf.random.uniform((BATCH,), 0, ROWS, tf.int32))[0, 0]
            return total

        @tf.function
        def push_rows(times: Any) -> None:
            rows = tf.ones((BATCH, WIDTH))
            for _ in tf.range(times):
                tf.autograph.experimental.set_loop_options(parallel_iterations=1)
                table.scatter_add(tf.IndexedSlices(rows, tf.random.uniform((BATCH,), 0, ROWS, tf.int32)))

        found |= {"pull rows": rate_of(pull_rows, cases[0][1]), "push rows": rate_of(push_rows, cases[0][1])}

    @tf.function
    def empty() -> None:
        pass

    found |= functions(coordinator, empty, 300, 1000)
    print(json.dumps(found), flush=True)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("localhost", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    main()
