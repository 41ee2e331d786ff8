"""Four workers share a heap of jobs; one is killed in the middle of one, comes back, and no job is lost.

    python examples/worker_pool.py

Takes two seconds. Expect "rank 2 replaced, generation 1" and 40 results.
"""

import asyncio
import os
import signal
from typing import Any

import argosy


class Worker:
    def count_primes(self, below: int) -> int:
        return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, below))

    def pid(self) -> int:
        return os.getpid()


async def keep_busy(worker: Any, jobs: list[int], results: dict[int, int]) -> None:
    while jobs:
        job = jobs.pop()
        try:
            results[job] = await worker.count_primes(job)
        except argosy.PeerLost as lost:
            print(lost)
            jobs.append(job)  # For whoever is free next; the worker itself is replaced meanwhile.


async def main() -> None:
    with argosy.local() as cluster:
        mesh = cluster.mesh(ranks=4, restart=argosy.Restart.rank())
        workers = mesh.spawn(Worker)
        victim = await workers[2].pid()
        jobs, results = [10_000 + 100 * n for n in range(40)], dict[int, int]()
        pool = asyncio.gather(*(keep_busy(worker, jobs, results) for worker in workers))
        await asyncio.sleep(0.1)
        os.kill(victim, signal.SIGKILL)
        await pool
        print(mesh.events.wait("replaced"))
        print(len(results), "results, the largest", max(results.values()))


if __name__ == "__main__":
    asyncio.run(main())
