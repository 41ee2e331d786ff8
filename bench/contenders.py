"""Start the contenders' commands in a private place, with deadlines, and leave nothing behind.

Every process that a bench starts carries a mark in its environment; what is left of a sample when it ends is
found by that mark, wherever it hid (Ray and Monarch make sessions of their own), and killed.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from harness import Failed
from peers import ROOT, torchrun

sys.path.insert(0, str(ROOT / "src"))  # The Argosy of this clone, whatever is installed.
SCRIPTS = Path(__file__).resolve().parent / "scripts"
MARK = "ARGOSY_BENCH_MARK"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(true: Callable[[], bool], deadline_s: float, what: str, every_s: float = 0.002) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {deadline_s:g} s")
        time.sleep(every_s)


def sweep(mark: str) -> int:
    """Kill whatever still carries this mark; returns how many there were."""
    token = f"{MARK}={mark}".encode()
    found = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if token in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                found += 1
    return found


class Live:
    """A command that runs: its output arrives as lines with the time at which each was seen."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.argv = list(argv)
        self.lines: list[tuple[float, str]] = []
        self.seconds = 0.0
        self.started_at, self._start = time.time(), time.perf_counter()
        self._popen = subprocess.Popen(
            self.argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as stream:
            for raw in stream:
                self.lines.append((time.time(), raw.decode(errors="replace").rstrip("\n")))

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def text(self, last: int = 0) -> str:
        return "\n".join(line for _, line in self.lines[-last:])

    def wait(self, deadline_s: float) -> int:
        """Wait for the end and all output; returns the exit code."""
        # Not Popen.wait, which polls every 50 ms when given a deadline.
        gone, _, _ = select.select([self._pidfd], [], [], deadline_s)
        if not gone:
            raise Failed(f"not gone within {deadline_s:g} s")
        self.seconds = time.perf_counter() - self._start
        self._reader.join(2.0)
        return self._popen.wait()

    def time(self, deadline_s: float) -> float:
        """Seconds from the command to its successful end."""
        code = self.wait(deadline_s)
        if code != 0:
            raise Failed(f"exit code {code}: {self.last_word()}")
        return self.seconds

    def last_word(self) -> str:
        """The line that most likely says what went wrong."""
        spoken = [line.strip() for _, line in self.lines if line.strip()]
        errors = [line for line in spoken if re.search(r"\b\w*(Error|Exception)\b", line)]
        return (errors or spoken or ["silent"])[-1][:160]

    def wait_line(self, pattern: str, deadline_s: float, after: float = 0.0) -> float:
        """Wait for a line that the pattern matches, seen after a time; returns when it was seen."""
        wanted, read, end = re.compile(pattern), 0, time.monotonic() + deadline_s
        while True:
            over = self.ended and not self._reader.is_alive()
            while read < len(self.lines):
                seen_at, line = self.lines[read]
                read += 1
                if seen_at >= after and wanted.search(line):
                    return seen_at
            if over or time.monotonic() > end:
                why = "ended" if over else f"silent for {deadline_s:g} s"
                raise Failed(f"{why} without saying {pattern!r}: {self.last_word()}")
            time.sleep(0.001)

    def end(self, grace_s: float = 5.0) -> None:
        """Ask, then kill, the whole group."""
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            if self.ended:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._reader.join(2.0)
        with contextlib.suppress(OSError):
            os.close(self._pidfd)


class Stage:
    """A private directory and environment for the samples of one bench; closing it ends everything in it."""

    def __init__(self) -> None:
        # Short, because Unix sockets live below it.
        self.root = Path(tempfile.mkdtemp(prefix="argosy-bench-", dir="/tmp"))
        self.mark = self.root.name
        self._count = 0
        self._primed: set[str] = set()

    def __enter__(self) -> "Stage":
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        # For what is asked of the agent from here; commands get it through `env`.
        os.environ["ARGOSY_RUNTIME_DIR"] = str(self.root / "rt")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Failed):
            self.go_cold()
        sweep(self.mark)
        shutil.rmtree(self.root, ignore_errors=True)

    def env(self, mark: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ARGOSY_", "TORCHELASTIC_"))}
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {
            **kept,
            "PYTHONPATH": path,
            MARK: mark,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "ARGOSY_RUNTIME_DIR": str(self.root / "rt"),
            "XDG_STATE_HOME": str(self.root / "state"),
            "RAY_TMPDIR": str(self.root),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
        }

    def new_dir(self) -> Path:
        self._count += 1
        path = self.root / f"d{self._count}"
        path.mkdir()
        return path

    @contextlib.contextmanager
    def live(self, argv: Sequence[str], extra: Mapping[str, str] | None = None) -> Generator[Live]:
        """Run a peer's command; at the end of the block it and all that it started are gone."""
        self._count += 1
        mark = f"{self.mark}-{self._count}"
        command = Live(argv, {**self.env(mark), **(extra or {})}, self.root)
        try:
            yield command
        finally:
            command.end()
            sweep(mark)

    def time(self, argv: Sequence[str], deadline_s: float, extra: Mapping[str, str] | None = None) -> float:
        """Seconds from the command to its successful end."""
        with self.live(argv, extra) as command:
            return command.time(deadline_s)

    # Argosy: its environment must not change from sample to sample, or each would start a zygote of its own.

    def argosy(self, *args: str, extra: Mapping[str, str] | None = None) -> contextlib.AbstractContextManager[Live]:
        return self.unmarked([*argosy(), *args], extra)

    @contextlib.contextmanager
    def unmarked(self, argv: Sequence[str], extra: Mapping[str, str] | None = None) -> Generator[Live]:
        """Run a command of Argosy's whose environment is that of all others, except for `extra`."""
        command = Live(argv, {**self.env(self.mark), **(extra or {})}, self.root)
        try:
            yield command
        finally:
            command.end(grace_s=10.0)

    def time_argosy(self, *args: str, deadline_s: float) -> float:
        with self.argosy(*args) as command:
            return command.time(deadline_s)

    def go_cold(self) -> None:
        """End warden, agent and zygotes, so that the next launch finds nothing."""
        self._primed.clear()
        if (self.root / "rt").exists():
            with self.argosy("stop", "--all") as command:
                if command.wait(60) != 0:
                    raise Failed(f"argosy stop --all: {command.text(3)}")

    def time_cold(self, *args: str, deadline_s: float) -> float:
        self.go_cold()
        return self.time_argosy(*args, deadline_s=deadline_s)

    def time_warm(self, key: str, *args: str, deadline_s: float) -> float:
        """Time a launch that finds a zygote left by an earlier one of the same key, made here if need be."""
        if key not in self._primed:
            self.time_argosy(*args, deadline_s=deadline_s)
            self._primed.add(key)
        return self.time_argosy(*args, deadline_s=deadline_s)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # Through the stage's exit, which cleans up.


def argosy() -> list[str]:
    return [sys.executable, "-m", "argosy"]


def torchrun_command(ranks: int, *args: str, flags: Sequence[str] = ()) -> list[str]:
    place = ["--nnodes=1", f"--nproc-per-node={ranks}"]
    where = [] if flags else ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [*torchrun(), *place, *where, *flags, *args]
