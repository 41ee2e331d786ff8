"""Monarch: calls.   monarch_calls.py {one|busy|gather|pipeline|actor|argument|result|mesh|lost} N"""

import os
import signal
import sys
import threading
import time
from typing import Any

import monarch.actor
from monarch.actor import Actor, endpoint, this_host
from timing import each, once, say

MIB = 1 << 20


class Worker(Actor):
    @endpoint
    async def ping(self, x: Any) -> Any:
        return x

    @endpoint
    async def swallow(self, array: Any) -> int:
        return len(array)

    @endpoint
    async def make(self, size: int) -> Any:
        import torch

        if not hasattr(self, "made"):
            self.made = torch.ones(size, dtype=torch.uint8)
        return self.made

    @endpoint
    async def spin(self) -> None:
        def compute() -> None:  # Its processes do not find modules beside the script.
            while True:
                sum(range(1000))

        threading.Thread(target=compute, daemon=True).start()

    @endpoint
    async def load(self) -> None:
        import torch

        assert torch.ones(1).item() == 1.0

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def relay(self, other: Any, count: int) -> list[float]:
        values: list[float] = []
        for _ in range(count):
            began = time.perf_counter()
            await other.ping.call_one(1)
            values.append(time.perf_counter() - began)
        return values


def lost(one: Any) -> list[float]:
    monarch.actor.unhandled_fault_hook = lambda _fault: None  # Else it ends this process, too.
    pid = one.pid.call_one().get()
    time.sleep(0.5)
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        one.ping.call_one(1).get(timeout=60)
    except TimeoutError:
        return []
    except Exception:
        return [time.perf_counter() - began]
    return []


def main() -> None:
    what, count = sys.argv[1], int(sys.argv[2])
    ranks = {"gather": count, "mesh": count, "actor": 2, "lost": 4}.get(what, 1)
    began = time.perf_counter()
    procs = this_host().spawn_procs(per_host={"procs": ranks})
    workers = procs.spawn("workers", Worker)
    one = workers.slice(procs=0)
    workers.ping.call(1).get()
    if what == "mesh":
        workers.load.call().get()
        say([time.perf_counter() - began])
    if what == "lost":
        say(lost(one))
        os._exit(0)
    match what:
        case "one":
            say(each(lambda: one.ping.call_one(1).get(), count))
        case "busy":
            one.spin.call_one().get()
            say(each(lambda: one.ping.call_one(1).get(), count))
        case "gather":
            say(each(lambda: workers.ping.call(1).get(), 20))
        case "pipeline":
            say(once(lambda: [f.get() for f in [one.ping.call_one(i) for i in range(count)]], count))
        case "actor":
            say(one.relay.call_one(workers.slice(procs=1), count).get())
        case "argument":
            import torch

            array = torch.ones(256 * MIB, dtype=torch.uint8)
            say(each(lambda: one.swallow.call_one(array).get(), count))
        case "result":
            say(each(lambda: one.make.call_one(256 * MIB).get(), count))
    os._exit(0)  # Its own end fails now and then, and is not measured; the bench sweeps up.


if __name__ == "__main__":
    main()
