"""Train a small neural network on handwritten digits, on any number of replicas.

``python train_digits.py`` trains on one, ``mpiexec -n 4 python train_digits.py`` on four, to the same weights up to rounding:
gradients, loss and number of examples are summed over all replicas before anything is divided. If replicas have GPUs, they
compute there: ``strategy.array_module`` is CuPy then, and NumPy elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistrat

Array = NDArray[Any]
Arrays = dict[str, Array]

TRAINING_IMAGES = 1497  # of 1797; the others are for the test


def load() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return training and test data as (images, labels): rows of 64 pixels between 0 and 1, and digits."""
    from sklearn.datasets import load_digits  # takes seconds, which ranks that receive the data need not wait for

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return (images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES]), (images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:])


def first_weights(hidden: int) -> Arrays:
    """Return the random initial weights, with `hidden` units in the hidden layer."""
    rng = np.random.default_rng(1)
    shapes = {"w1": (64, hidden), "b1": (hidden,), "w2": (hidden, 10), "b2": (10,)}
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def forward(weights: dict[str, Any], images: Array) -> tuple[Array, Array]:
    """Return the hidden layer and the logarithms of the ten probabilities of each image."""
    xp = mpistrat.get_strategy().array_module
    hidden = xp.maximum(images @ weights["w1"] + weights["b1"], 0)
    scores = hidden @ weights["w2"] + weights["b2"]
    scores -= scores.max(axis=1, keepdims=True)
    return hidden, scores - xp.log(xp.exp(scores).sum(axis=1, keepdims=True))


def loss_and_gradients(weights: dict[str, Any], images: Array, labels: Array) -> tuple[Array, Arrays]:
    """Return the cross-entropy and its gradients, summed over these images, of which there may be none."""
    xp = mpistrat.get_strategy().array_module
    hidden, log_probabilities = forward(weights, images)
    truth = xp.eye(10, dtype=xp.float32)[labels]
    error = xp.exp(log_probabilities) - truth
    back = (error @ weights["w2"].T) * (hidden > 0)
    gradients = {"w1": images.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ error, "b2": error.sum(axis=0)}
    return -(log_probabilities * truth).sum(), gradients


def train(
    strategy: mpistrat.Strategy,
    epochs: int = 12,
    batch_size: int = 128,
    rate: float = 0.1,
    momentum: float = 0.9,
    hidden: int = 64,
    checkpoints: Path | None = None,
    on_start: Callable[[int], None] | None = None,
    on_step: Callable[[int, float, int], None] | None = None,
) -> tuple[Arrays, float, list[float]]:
    """Return the weights, the accuracy on the test data, and the loss of each step.

    With a folder for `checkpoints`, each epoch is saved there, and training goes on after the last one that was. On every rank
    ``on_start(epoch)`` is called before the first step, and ``on_step(epoch, loss, examples)`` after each one.
    """
    # one rank loads: that all import scikit-learn would take longer than training
    training, (test_images, test_labels) = strategy.communicator.broadcast_object(load() if strategy.rank == 0 else None)
    start = first_weights(hidden)
    with strategy.scope():
        weights = {name: mpistrat.Variable(value, name=name) for name, value in start.items()}
        velocity = {name: mpistrat.Variable(np.zeros_like(value), trainable=False) for name, value in start.items()}

    def step(batch: tuple[Array, Array]) -> tuple[Array, Array]:
        context = mpistrat.get_replica_context()
        loss, gradients = loss_and_gradients(weights, *batch)
        sums = {"gradients": gradients, "loss": loss, "examples": np.float32(len(batch[0]))}
        sums = context.all_reduce("sum", sums)
        for name, gradient in sums["gradients"].items():
            mean = gradient / sums["examples"]
            context.update(velocity[name], lambda v, g: momentum * v - rate * g, (mean,))
            context.update(weights[name], np.add, (velocity[name],))
        return sums["loss"] / sums["examples"], sums["examples"]

    history = []
    dataset = mpistrat.ArrayDataset(training, batch_size, shuffle=True)
    batches = strategy.experimental_distribute_dataset(dataset)
    manager, first = None, 0
    if checkpoints:
        with strategy.scope():
            checkpoint = mpistrat.Checkpoint(weights=weights, velocity=velocity, batches=batches)
        manager = mpistrat.CheckpointManager(checkpoint, checkpoints)
        first = manager.restore() or 0
    if on_start:
        on_start(first)
    for epoch in range(first, epochs):
        for batch in batches:
            [(loss, examples)] = strategy.experimental_local_results(strategy.run(step, args=(batch,)))
            history.append(float(loss))
            if on_step:
                on_step(epoch, history[-1], int(examples))
        if manager:
            manager.save(epoch + 1)
    if manager:
        manager.close()
    xp = strategy.array_module
    found = forward(weights, xp.asarray(test_images))[1].argmax(axis=1)
    accuracy = float((found == xp.asarray(test_labels)).mean())
    return {name: variable.numpy() for name, variable in weights.items()}, accuracy, history


if __name__ == "__main__":
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    _, accuracy, history = train(strategy)
    if strategy.extended.should_save_summary:
        print(f"{strategy.num_replicas_in_sync} replicas: loss {history[-1]:.3f}, test accuracy {accuracy:.3f}")
