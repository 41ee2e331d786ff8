"""Ray: calls.   ray_calls.py {one|busy|gather|pipeline|actor|argument|result|mesh|lost|back} N"""

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import ray
from timing import each, once, say, spin

MIB = 1 << 20


@ray.remote(num_cpus=1, max_restarts=-1)
class Worker:
    def __init__(self, torch: bool = False) -> None:
        if torch:
            import torch

            assert torch.ones(1).item() == 1.0

    def ping(self, x: Any) -> Any:
        return x

    def swallow(self, array: Any) -> int:
        return len(array)

    def make(self, size: int) -> Any:
        if not hasattr(self, "made"):
            self.made = np.ones(size, dtype=np.uint8)
        return self.made

    def spin(self) -> None:
        threading.Thread(target=spin, daemon=True).start()

    def relay(self, other: Any, count: int) -> list[float]:
        return each(lambda: ray.get(other.ping.remote(1)), count)

    def pid(self) -> int:
        return os.getpid()


def lost(back: bool) -> list[float]:
    worker, values = Worker.remote(torch=back), list[float]()
    for _ in range(3):
        pid = ray.get(worker.pid.remote())
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            while True:
                ray.get(worker.ping.remote(1))
        except ray.exceptions.RayActorError:
            if not back:
                values.append(time.perf_counter() - began)
        while True:
            try:
                ray.get(worker.ping.remote(1))
                break
            except ray.exceptions.RayActorError:
                continue
        if back:
            values.append(time.perf_counter() - began)
    return values


def main() -> None:
    what, count = sys.argv[1], int(sys.argv[2])
    ray.init(num_cpus=512, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    if what in ("lost", "back"):
        say(lost(what == "back"))
        return
    began = time.perf_counter()
    workers = [Worker.remote(what == "mesh") for _ in range({"gather": count, "mesh": count, "actor": 2}.get(what, 1))]
    ray.get([worker.ping.remote(1) for worker in workers])
    if what == "mesh":
        say([time.perf_counter() - began])
    one = workers[0]
    array = np.ones(256 * MIB, dtype=np.uint8)
    match what:
        case "one":
            say(each(lambda: ray.get(one.ping.remote(1)), count))
        case "busy":
            ray.get(one.spin.remote())
            say(each(lambda: ray.get(one.ping.remote(1)), count))
        case "gather":
            say(each(lambda: ray.get([worker.ping.remote(1) for worker in workers]), 20))
        case "pipeline":
            say(once(lambda: ray.get([one.ping.remote(i) for i in range(count)]), count))
        case "actor":
            say(ray.get(one.relay.remote(workers[1], count)))
        case "argument":
            say(each(lambda: ray.get(one.swallow.remote(array)), count))
        case "result":
            say(each(lambda: ray.get(one.make.remote(256 * MIB)), count))


if __name__ == "__main__":
    main()
