"""One rank of the trainings in the experiment on wire dtypes: the demo's network, once with each; rank 0 prints the losses."""

import json
import sys
from typing import Any

import numpy as np

import mpistrat
from mpistrat.tools import train_digits

HIDDEN = 64


def main() -> None:
    """Train with each of the options in ``sys.argv[1]``, an object of JSON, by name."""
    found = {}
    for name, fields in json.loads(sys.argv[1]).items():
        # auto would leave so few bytes to MPI, which casts nothing
        algorithm = "auto" if fields.get("deterministic") else "hierarchical"
        options = mpistrat.experimental.CommunicationOptions(algorithm=algorithm, **fields)
        strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
        weights, accuracy, losses = train_digits.train(strategy, hidden=HIDDEN)
        found[name] = {"weights": weights, "accuracy": accuracy, "losses": losses}
        strategy.close()
    exact, start = found["float32"]["weights"], train_digits.first_weights(HIDDEN)
    distances = {name: _norm(one.pop("weights"), exact) / _norm(start, exact) for name, one in found.items()}
    if strategy.is_chief:
        print(json.dumps({name: {**one, "distance": distances[name]} for name, one in found.items()}))


def _norm(weights: dict[str, Any], others: dict[str, Any]) -> float:
    return float(np.sqrt(sum(float(((weights[name] - others[name]) ** 2).sum()) for name in weights)))


if __name__ == "__main__":
    main()
