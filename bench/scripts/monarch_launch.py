"""Monarch: N processes with an actor each, one call to all, gone.   monarch_launch.py N {plain|torch}"""

import sys

from monarch.actor import Actor, endpoint, this_host


class Worker(Actor):
    def __init__(self, what: str) -> None:
        if what == "torch":
            import torch

            assert torch.ones(1).item() == 1.0

    @endpoint
    async def ping(self) -> int:
        return 1


def main() -> None:
    procs = this_host().spawn_procs(per_host={"procs": int(sys.argv[1])})
    workers = procs.spawn("workers", Worker, sys.argv[2])
    workers.ping.call().get()
    procs.stop().get()


if __name__ == "__main__":
    main()
