"""multiprocessing's forkserver, started afresh: N processes at a barrier.   forkserver.py N {plain|torch}

With `torch`, torch is preloaded in the server, which is the best that the standard library can do.
"""

import multiprocessing
import sys
from typing import Any


def work(barrier: Any, what: str) -> None:
    if what == "torch":
        import torch

        assert torch.ones(1).item() == 1.0
    barrier.wait(300)


def main() -> None:
    count, what = int(sys.argv[1]), sys.argv[2]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch"] if what == "torch" else ["__main__"])
    barrier = context.Barrier(count)
    workers = [context.Process(target=work, args=(barrier, what)) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers))


if __name__ == "__main__":
    main()
