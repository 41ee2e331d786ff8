"""trouble.py for Ray: four actors make steps, the third raises at step 12.   ray_trouble.py DIR"""

import sys
import time
from pathlib import Path

import ray


class Worker:
    def __init__(self, rank: int, home: str) -> None:
        self.rank, self.home = rank, Path(home)

    def step(self, number: int) -> int:
        if number == 12 and self.rank == 2:
            (self.home / "trouble").write_text(f"{time.time():.6f}")
            raise ValueError("the loss is not finite")
        time.sleep(0.02)
        return number


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    workers = [ray.remote(num_cpus=1)(Worker).remote(rank, sys.argv[1]) for rank in range(4)]
    for number in range(100):
        ray.get([worker.step.remote(number) for worker in workers])


if __name__ == "__main__":
    main()
