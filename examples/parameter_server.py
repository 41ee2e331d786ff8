"""One actor holds the weights of a linear model; four others push gradients and pull weights as they like.

    python examples/parameter_server.py

Takes two seconds. Expect an error that falls below 0.01.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import argosy

TRUTH = np.linspace(-1.0, 1.0, 1000)
Weights = NDArray[np.float64]


class Server:
    """Its endpoints run one after another, so no lock is needed."""

    def __init__(self, rate: float) -> None:
        self.weights, self.rate, self.pushes = np.zeros_like(TRUTH), rate, 0

    def pull(self) -> Weights:
        return self.weights

    def push(self, gradient: Weights) -> Weights:
        """Make a step, and return what the weights are now."""
        self.weights -= self.rate * gradient
        self.pushes += 1
        return self.weights

    def report(self) -> str:
        error = float(np.abs(self.weights - TRUTH).max())
        return f"{self.pushes} pushes, largest error {error:.4f}"


class Learner:
    """Was given the server's handle and calls it directly."""

    def __init__(self, server: Any, batch: int) -> None:
        self.server, self.batch = server, batch
        self.random = np.random.default_rng(argosy.here().rank.index)

    def learn(self, steps: int) -> None:
        weights = self.server.pull().get()
        for _ in range(steps):
            x = self.random.choice([-1.0, 1.0], (self.batch, len(TRUTH)))
            gradient = x.T @ (x @ (weights - TRUTH)) / self.batch
            weights = self.server.push(gradient).get()


def main() -> None:
    with argosy.local() as cluster:
        server = cluster.mesh(ranks=1).spawn(Server, rate=0.01)[0]
        learners = cluster.mesh(ranks=4).spawn(Learner, server, batch=64)
        for _ in range(4):
            learners.learn(50).gather()
            print(server.report().get())


if __name__ == "__main__":
    main()
