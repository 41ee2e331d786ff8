"""Ray: an actor is killed or stopped; how long until a call raises, or until its replacement answers.

ray_failures.py {kill|stop|replace} [TRIES]     prints `value SECONDS` for each try
"""

import os
import signal
import sys
import time

import ray
from ray.exceptions import RayActorError


class Worker:
    def __init__(self, what: str) -> None:
        if what == "torch":
            import torch

            assert torch.ones(1).item() == 1.0

    def pid(self) -> int:
        return os.getpid()


def detect(how: str) -> float | None:
    worker = ray.remote(num_cpus=1, max_restarts=0)(Worker).remote("plain")
    pid = ray.get(worker.pid.remote())
    start = time.time()
    os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    try:
        while True:
            ray.get(worker.pid.remote(), timeout=10)
    except RayActorError:
        return time.time() - start
    except ray.exceptions.GetTimeoutError:
        return None


def replace() -> float:
    worker = ray.remote(num_cpus=1, max_restarts=5, max_task_retries=-1)(Worker).remote("torch")
    pid = ray.get(worker.pid.remote())
    time.sleep(1)
    start = time.time()
    os.kill(pid, signal.SIGKILL)
    while ray.get(worker.pid.remote()) == pid:
        pass
    return time.time() - start


def main() -> None:
    ray.init(num_cpus=64, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
        seconds = replace() if sys.argv[1] == "replace" else detect(sys.argv[1])
        if seconds is not None:
            print(f"value {seconds:.6f}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
