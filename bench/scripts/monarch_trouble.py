"""trouble.py for Monarch: four actors make steps, the third raises at step 12.   monarch_trouble.py DIR"""

import sys
import time
from pathlib import Path

from monarch.actor import Actor, current_rank, endpoint, this_host


class Worker(Actor):
    def __init__(self, home: str) -> None:
        self.home = Path(home)

    @endpoint
    async def step(self, number: int) -> int:
        if number == 12 and current_rank().rank == 2:
            (self.home / "trouble").write_text(f"{time.time():.6f}")
            raise ValueError("the loss is not finite")
        time.sleep(0.02)
        return number


def main() -> None:
    procs = this_host().spawn_procs(per_host={"procs": 4})
    workers = procs.spawn("workers", Worker, sys.argv[1])
    for number in range(100):
        workers.step.call(number).get()


if __name__ == "__main__":
    main()
