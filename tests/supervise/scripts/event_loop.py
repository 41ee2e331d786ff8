"""asyncio with a subprocess, a signal handler and a task that fails."""

import asyncio
import os
import signal
import sys


async def fails() -> None:
    await asyncio.sleep(0)
    raise RuntimeError("in a task")


async def main() -> None:
    seen = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, seen.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await seen.wait()
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print('child')")
    print("child ended with", await child.wait())
    await asyncio.create_task(fails())


asyncio.run(main())
