"""Start and end the drain of a run. Imports no numpy: the process that calls this may be the agent."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from argosy.observe.spans import has_records

END_S = 10.0


class DrainProcess:
    """The drain of one run on this host; it starts when a rank has recorded something."""

    def __init__(
        self, memory: Path, directory: Path, launch: int, program: Sequence[str] = ("argosy.observe.drain",)
    ) -> None:
        self._memory = memory
        module, *more = program
        self._command = [sys.executable, "-m", module, str(memory), str(directory), str(launch), *more]
        self._process: subprocess.Popen[bytes] | None = None
        self._finishing = False

    def tend(self) -> None:
        """Start the drain if there is something to drain and none runs; never blocks, never raises."""
        if not self._finishing:
            self._start()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        if not any(has_records(path) for path in self._memory.glob("*.page.spans")):
            return
        with suppress(OSError):
            if self._another_drains():
                return
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def _another_drains(self) -> bool:
        """Whether a drain that an earlier agent started is still at work."""
        fd = os.open(self._memory / "drain.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return not (self._memory / "drain.end").exists()  # At the end the next one waits for it.
        finally:
            os.close(fd)
        return False

    def finish(self, said: str = "", wait_s: float | None = None) -> None:
        """Let the drain take what is left and end; `said` is for it to read. Another thread may call `tend` meanwhile.

        Blocks until it has ended; after END_S it is killed, or after `wait_s` left to itself.
        """
        self._finishing = True
        with suppress(OSError):
            (self._memory / "drain.end").write_text(said)
        self._start()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S if wait_s is None else wait_s)
            if self._process.poll() is None and wait_s is None:
                self._process.kill()
                self._process.wait()
