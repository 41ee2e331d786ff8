"""A pool of workers squares numbers. One worker is killed while it works, and is replaced.

    python examples/survive_a_kill.py

Takes two seconds. Expect "rank 2 replaced, generation 1".
"""

import os
import signal

import argosy


class Worker:
    def __init__(self, power: int) -> None:
        self.power = power

    @argosy.endpoint(idempotent=True)
    def raise_it(self, x: int) -> int:
        return x**self.power

    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    with argosy.local() as cluster:
        mesh = cluster.mesh(ranks=4, restart=argosy.Restart.rank())
        workers = mesh.spawn(Worker, power=2)
        patient = workers.options(retry=3, deadline_s=60)
        replies = [patient[x % 4].raise_it(x) for x in range(100)]
        os.kill(workers[2].pid().get(), signal.SIGKILL)
        replies += [patient[x % 4].raise_it(x) for x in range(100, 200)]
        assert [reply.get() for reply in replies] == [x * x for x in range(200)]
        print("200 squares are right")
        print(mesh.events.wait("lost"))
        print(mesh.events.wait("replaced"))


if __name__ == "__main__":
    main()
