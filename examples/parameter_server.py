"""Four workers fit a line. A server holds the parameters, and the workers call it directly.

    python examples/parameter_server.py

Takes two seconds. Expect "y = 3.00 x + 2.00".
"""

from typing import Any

import numpy as np

import argosy


class Server:
    """Holds slope and intercept."""

    def __init__(self) -> None:
        self.parameters = np.zeros(2)

    def pull(self) -> np.ndarray:
        return self.parameters

    def push(self, gradient: np.ndarray) -> None:
        self.parameters -= 0.1 * gradient


class Worker:
    """Has data of its own."""

    def __init__(self, server: Any) -> None:
        self.server = server
        chance = np.random.default_rng(argosy.here().rank.index)
        self.x = chance.uniform(-1, 1, 1000)
        self.y = 3 * self.x + 2

    def train(self, steps: int) -> None:
        for _ in range(steps):
            slope, intercept = self.server.pull().get()
            wrong = slope * self.x + intercept - self.y
            self.server.options(reply=False).push(2 * np.array([np.mean(wrong * self.x), np.mean(wrong)]))


def main() -> None:
    with argosy.local() as cluster:
        server = cluster.mesh(ranks=1).spawn(Server)[0]
        cluster.mesh(ranks=4).spawn(Worker, server).train(100).gather()
        slope, intercept = server.pull().get()
        print(f"y = {slope:.2f} x + {intercept:.2f}")


if __name__ == "__main__":
    main()
