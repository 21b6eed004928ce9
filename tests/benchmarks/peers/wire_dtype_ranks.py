"""One rank of the trainings in the experiment on wire dtypes: the demo's network, once with each; rank 0 prints the losses."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.experimental import CommunicationOptions
from mpistrat.reduction import ReduceOp
from mpistrat.tools import train_digits

HIDDEN, MOMENTUM = 64, 0.9
Data = tuple[np.ndarray, np.ndarray]


def main() -> None:
    """Train in each way of ``sys.argv[1]``, with each of the options in ``sys.argv[2]``: objects of JSON, by name."""
    ways, kinds = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    found = {way: {name: _train(fields, **how) for name, fields in kinds.items()} for way, how in ways.items()}
    for trained in found.values():
        weights = {name: one.pop("weights") for name, one in trained.items()}
        exact, start = weights["float32"], train_digits.first_weights(HIDDEN)
        for name, one in trained.items():
            one["distance"] = _norm(weights[name], exact) / _norm(start, exact)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found))


def _train(fields: dict[str, Any], epochs: int, batch: int, rate: float, shuffled: bool) -> dict[str, Any]:
    """Return the weights, the loss of all training images after each epoch, and the accuracy on the others."""
    # auto would leave so few bytes to MPI, which casts nothing
    algorithm = "auto" if fields.get("deterministic") else "hierarchical"
    options = CommunicationOptions(algorithm=algorithm, **fields)
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    ops = strategy.extended.communicator
    training, test = train_digits.load()
    if not shuffled:
        training = tuple(part[np.argsort(training[1], kind="stable")] for part in training)
    weights = train_digits.first_weights(HIDDEN)
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    rng, losses = np.random.default_rng(2), []
    for _ in range(epochs):
        order = rng.permutation(train_digits.TRAINING_IMAGES) if shuffled else np.arange(train_digits.TRAINING_IMAGES)
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            mine = np.array_split(chosen, ops.size)[ops.rank]
            _, gradients = train_digits.loss_and_gradients(weights, *(part[mine] for part in training))
            sums = ops.all_reduce(ReduceOp.SUM, list(gradients.values()))
            for name, gradient in zip(gradients, sums, strict=True):
                velocity[name] = MOMENTUM * velocity[name] - rate * gradient / np.float32(len(chosen))
                weights[name] = weights[name] + velocity[name]
        losses.append(_loss(weights, training))
    strategy.close()
    accuracy = np.mean(train_digits.forward(weights, test[0])[1].argmax(axis=1) == test[1])
    return {"weights": weights, "losses": losses, "accuracy": float(accuracy)}


def _loss(weights: dict[str, np.ndarray], data: Data) -> float:
    log_probabilities = train_digits.forward(weights, data[0])[1]
    return float(-np.mean(log_probabilities[np.arange(len(data[1])), data[1]], dtype=np.float64))


def _norm(weights: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(float(((weights[name] - others[name]) ** 2).sum()) for name in weights)))


if __name__ == "__main__":
    main()
