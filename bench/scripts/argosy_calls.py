"""Argosy: calls.   argosy_calls.py {one|busy|gather|pipeline|actor|argument|result|mesh|memory|lost|back|spare} N"""

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
from timing import available_gb, each, once, say, spin

import argosy

MIB = 1 << 20


class Worker:
    def ping(self, x: Any) -> Any:
        return x

    def swallow(self, array: Any) -> int:
        return len(array)

    def make(self, size: int) -> Any:
        if not hasattr(self, "made"):
            self.made = np.ones(size, dtype=np.uint8)
        return self.made

    def relay(self, other: Any, count: int) -> list[float]:
        return each(lambda: other.ping(1).get(), count)

    def spin(self) -> None:
        threading.Thread(target=spin, daemon=True).start()

    def pid(self) -> int:
        return os.getpid()


def import_torch() -> None:
    import torch

    assert torch.ones(1).item() == 1.0


def lost(mesh: argosy.Mesh, back: bool) -> list[float]:
    workers, values = mesh.spawn(Worker), list[float]()
    for _ in range(5):
        others, pid = workers.pid().gather(), workers[1].pid().get()
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            while True:
                workers[1].ping(1).get()
        except argosy.PeerLost:
            if not back:
                values.append(time.perf_counter() - began)
        workers[1].ping(1).get()
        if back:
            values.append(time.perf_counter() - began)
        same = [before == now for before, now in zip(others, workers.pid().gather(), strict=True)]
        assert same == [True, False, True, True], same
        time.sleep(1.0)  # Until then a spare that was used is replaced.
    return values


def main() -> None:
    what, count = sys.argv[1], int(sys.argv[2])
    ranks = {"gather": count, "mesh": count, "memory": count, "actor": 2, "lost": 4, "back": 4, "spare": 4}.get(what, 1)
    torch = ["torch"] if what in ("mesh", "memory", "back", "spare") else []
    with argosy.local(show=False) as cluster:
        began, free_gb = time.perf_counter(), available_gb()
        restart, spares = argosy.Restart.rank(), int(what == "spare")
        mesh = cluster.mesh(ranks=ranks, preload=torch, restart=restart, spares=spares, name=f"bench-{os.getpid()}")
        if what == "mesh":
            mesh.run(os.getpid).gather()
            say([time.perf_counter() - began])
            return
        if what == "memory":
            mesh.run(import_torch).gather()
            say([free_gb - available_gb()])
            return
        if what in ("lost", "back", "spare"):
            time.sleep(1.0)
            say(lost(mesh, what != "lost"))
            return
        workers = mesh.spawn(Worker)
        one = workers[0]
        one.ping(1).get()
        array = np.ones(256 * MIB, dtype=np.uint8)
        match what:
            case "one":
                say(each(lambda: one.ping(1).get(), count))
            case "busy":
                one.spin().get()
                say(each(lambda: one.ping(1).get(), count))
            case "gather":
                say(each(lambda: workers.ping(1).gather(), 20))
            case "pipeline":
                for _ in range(2):
                    values = once(lambda: [r.get() for r in [one.ping(i) for i in range(count)]], count)
                say(values)
            case "actor":
                say(one.relay(workers[1], count).get())
            case "argument":
                say(each(lambda: one.swallow(array).get(), count))
            case "result":
                say(each(lambda: one.make(256 * MIB).get(), count))


if __name__ == "__main__":
    main()
