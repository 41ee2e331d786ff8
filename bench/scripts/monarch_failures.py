"""Monarch: one process of N is killed or stopped; how long until a call to all of them raises.

monarch_failures.py N {kill|stop} [setting=value ...]     prints `value SECONDS`
"""

import os
import signal
import sys
import time

import monarch.actor
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure


class Worker(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()


def main() -> None:
    count, how = int(sys.argv[1]), sys.argv[2]
    settings = dict(text.split("=") for text in sys.argv[3:])
    if settings:
        configure(**settings)
    monarch.actor.unhandled_fault_hook = lambda _fault: None
    procs = this_host().spawn_procs(per_host={"procs": count})
    workers = procs.spawn("workers", Worker)
    pids = [pid for _, pid in workers.pid.call().get().items()]
    time.sleep(0.5)
    start = time.time()
    os.kill(pids[count // 2], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    try:
        workers.pid.call().get(timeout=30)
    except BaseException as error:
        if not isinstance(error, TimeoutError):
            print(f"value {time.time() - start:.6f}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
