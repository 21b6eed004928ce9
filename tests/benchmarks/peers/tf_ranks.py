"""TensorFlow's MultiWorkerMirroredStrategy: all_reduce in a replica context, by its ring."""

import json
import os

from turns import Task, serve

hosts, rank = os.environ["CONTEST_HOSTS"].split(","), int(os.environ["CONTEST_RANK"])
workers = [f"{host}:{31000 + index}" for index, host in enumerate(hosts)]
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import tensorflow as tf  # noqa: E402 - reads the variables

tf.config.threading.set_intra_op_parallelism_threads(1)
options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
strategy.extended._enable_check_health = False
device = f"/job:worker/replica:0/task:{rank}/device:CPU:0"
expected = len(hosts) * (len(hosts) + 1) // 2


@tf.function
def step(tensors):
    """Sum tensors over all workers, in one call."""

    def replica(tensors):
        with tf.device(device):  # a tensor without a device is refused as a destination
            tensors = [tf.identity(tensor) for tensor in tensors]
        return tf.distribute.get_replica_context().all_reduce("sum", tensors)

    return strategy.run(replica, args=(tensors,))


def all_reduce(request):
    return _task([request["nbytes"] // 4])


def many(request):
    """Sum tensors of float32, in one call."""
    return _task(request["counts"])


def _task(counts):
    sources = [tf.fill((count,), rank + 1.0) for count in counts]
    number = tf.fill((1,), 1.0)
    state = {"sums": []}

    def run():
        state["sums"] = step(sources)
        state["sums"][-1].numpy()  # waits for it

    def is_right():
        right = all(bool((total.numpy() == expected).all()) for total in state["sums"])
        state["sums"] = []
        return right

    return Task(run, is_right, lambda: step([number])[0].numpy())


if __name__ == "__main__":
    serve(rank, {"TensorFlow": tf.__version__}, {"all_reduce": all_reduce, "many": many})
