"""Drive the `argosy` command as a user would.

Daemons start once for all tests of a worker: `terminal` opens a terminal on them, in a directory of its own, and fails
if anything of a run is left when it is closed. `cold_terminal` has daemons of its own, where those are the subject.
"""

import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from click.testing import CliRunner
from warm import warm, warm_python

from argosy.cli.ps import command as ps_command
from argosy.core import ArgosyError
from argosy.fabric import connect
from argosy.supervise.client.agent_client import ask
from argosy.supervise.messages import ListRuns, Runs, to_client

REPOSITORY = Path(__file__).resolve().parents[1]
T = TypeVar("T")
PATIENCE_S = 300.0
"""A bound against hangs, never an expectation of speed."""


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it said."""

    code: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        return self.out.decode() + self.err.decode()


@dataclass
class Console:
    """One user's terminal."""

    cwd: Path
    env: dict[str, str]
    runtime: Path
    python: str = sys.executable
    started: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def argosy(self, *words: str, **how: Any) -> Ended:
        return self.run([self.python, "-m", "argosy", *words], **how)

    def torchrun(self, *words: str) -> Ended:
        """torchrun; its ranks are forked from a process that has torch, unless they have other packages."""
        if self.python != sys.executable:
            return self.run([self.python, "-m", "torch.distributed.run", *words])
        return self.run([*warm(), "-m", "torch.distributed.run", *words], env={"PYTHON_EXEC": warm_python()})

    def run(
        self,
        words: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Ended:
        """Run a command to its end. Its exit code is a shell's: 128+n when a signal killed it."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            ended = subprocess.run(
                words,
                input=stdin,
                cwd=self.cwd,
                env={**self.env, **(env or {})},
                stdout=out,  # files: a daemon that kept a pipe open would make us wait for it
                stderr=err,
                timeout=patience_s,
            )
            out.seek(0)
            err.seek(0)
            code = ended.returncode
            return Ended(code if code >= 0 else 128 - code, out.read(), err.read())

    def start(self, *words: str, out: Path) -> subprocess.Popen[bytes]:
        """Start an argosy command that goes on; both its streams go to the file `out`."""
        with out.open("wb") as stream:
            command = subprocess.Popen(
                [self.python, "-m", "argosy", *words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=self.cwd,
                env=self.env,
            )
        self.started.append(command)
        return command

    def ps(self, name: str) -> dict[str, Any]:
        """What `argosy ps --all --json` says of one run, or an empty dict; asked in this process, since tests poll."""
        listing = CliRunner(env=self.env).invoke(ps_command, ["--all", "--json"], catch_exceptions=False)
        assert listing.exit_code == 0, listing.output
        runs: list[dict[str, Any]] = json.loads(listing.output)
        return next((run for run in runs if run["name"] == name), dict[str, Any]())

    def pid(self, name: str, rank: int, generation: int = 0) -> int:
        """The pid of a rank of a run, as soon as `argosy ps` knows it."""

        def find() -> int:
            ranks = self.ps(name).get("ranks", [])
            wanted = [r for r in ranks if (r["index"], r["generation"]) == (rank, generation)]
            return int(wanted[0]["pid"] or 0) if wanted else 0

        return until(find, f"rank {rank}.{generation} of {name} in argosy ps")

    @property
    def segments(self) -> Path:
        """Where the shared memory of this terminal's ranks is."""
        digest = hashlib.blake2s(os.fsencode(self.runtime), digest_size=6).hexdigest()
        return Path(f"/dev/shm/argosy-{os.getuid()}-{digest}")

    def leftovers(self) -> list[str]:
        """Processes that carry this terminal's runtime directory in their environment or arguments."""
        mine, found, segments = str(self.runtime), list[str](), str(self.segments)
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                words = process.cmdline()
                ours = process.environ().get("ARGOSY_RUNTIME_DIR") == mine or any(mine in word for word in words)
                if words and words[0].startswith("argosy: rank "):  # A title takes the place of the environment.
                    ours = segments in Path(f"/proc/{process.pid}/maps").read_text()
                elif words and words[0].startswith("argosy: zygote "):
                    ours = has_open(process.pid, mine)
                if ours:
                    found.append(f"{process.pid} {' '.join(words)}")
            except (psutil.Error, OSError):
                continue
        return found

    def cut_power(self) -> None:
        """End all of this terminal's processes at one moment, as a machine ends: none lives to replace another."""
        stopped = set[int]()
        while fresh := {int(line.split()[0]) for line in self.leftovers()} - stopped:
            for pid in fresh:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh
        # Children first: the kernel continues stopped processes when their parent's death orphans their group.
        for pid in sorted(stopped, key=depth, reverse=True):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.leftovers(), "all processes gone")


def depth(pid: int) -> int:
    """How many ancestors a process has."""
    with suppress(psutil.NoSuchProcess):
        return len(psutil.Process(pid).parents())
    return 0


def has_open(pid: int, path: str) -> bool:
    """Whether a process has a file open whose path begins with this."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # It may have been closed meanwhile.
            if os.readlink(f"/proc/{pid}/fd/{number}").startswith(path):
                return True
    return False


def until(ask: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Ask until the answer is true; fail by naming `what` after a generous time."""
    deadline = time.monotonic() + patience_s
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise AssertionError(f"never seen: {what}")
        time.sleep(0.05)
    return answer


def free_port() -> int:
    """A port that is free, and stays so until it is used: the kernel hands out none of these by itself."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first - 8000, first), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports in a row are taken")


def said(file: Path, pattern: str, patience_s: float = PATIENCE_S) -> re.Match[str]:
    """Wait until a line in `file` matches."""

    def look() -> re.Match[str] | None:
        return re.search(pattern, file.read_text(errors="replace"), re.MULTILINE) if file.exists() else None

    try:
        match = until(look, pattern, patience_s)
    except AssertionError:
        text = file.read_text(errors="replace") if file.exists() else "(no output)"
        raise AssertionError(f"never said: {pattern}\n{text[-4000:]}") from None
    assert match is not None
    return match


@dataclass
class Home:
    """Where daemons live: their runtime directory, their index of runs, their caches."""

    base: Path
    env: dict[str, str]

    @property
    def index(self) -> Path:
        return Path(self.env["XDG_STATE_HOME"], "argosy", "runs")

    def console(self, cwd: Path, python: str = sys.executable) -> Console:
        return Console(cwd, dict(self.env), self.base / "r", python)


def make_home() -> Home:
    # Short: the path of a socket has at most 108 bytes. In the sandbox of `make test`, if there is one.
    base = Path(tempfile.mkdtemp(prefix="argosy-t-", dir=os.environ.get("ARGOSY_SANDBOX", "/tmp")))
    env = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    env |= {"ARGOSY_RUNTIME_DIR": str(base / "r"), "XDG_STATE_HOME": str(base / "state")}
    # One thread: two that wait for each other on a busy machine take many times as long.
    env |= {"XDG_CACHE_HOME": str(base / "cache"), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    return Home(base, env)


def leave_home(home: Home) -> None:
    """Stop the daemons; fail if a process or a segment is left."""
    try:
        close(home.console(Path("/")))
    finally:
        shutil.rmtree(home.base, ignore_errors=True)


shared_home = functools.cache(make_home)
"""The daemons of all tests of this worker. The first run starts them."""


def leave_shared_home() -> None:
    """End them, if there are any: the worker ends, or a test left something behind."""
    if shared_home.cache_info().currsize:
        home = shared_home()
        shared_home.cache_clear()
        leave_home(home)


@contextmanager
def terminal(cwd: Path, python: str = sys.executable) -> Generator[Console]:
    """Open a terminal in `cwd`; when it is left, nothing that it started may remain but daemons."""
    home = shared_home()
    console = home.console(cwd, python)
    runs, before, index = living(console), footprint(console), entries(home.index)
    try:
        yield console
    finally:
        try:
            settle(console, runs, before)
        except BaseException:
            leave_shared_home()
            raise
        for entry in set(entries(home.index)) - set(index):
            entry.unlink(missing_ok=True)


def settle(console: Console, runs: set[str], before: set[str]) -> None:
    """End what a terminal started; fail if something of it is left then."""
    end_commands(console)
    for directory in living(console) - runs:
        stopped = console.argosy("stop", directory)
        assert stopped.code == 0 or directory not in living(console), stopped.text
    try:
        until(lambda: not footprint(console) - before, "nothing but daemons", 200.0)
    except AssertionError:
        raise AssertionError("left behind:\n" + "\n".join(footprint(console) - before)) from None


def footprint(console: Console) -> set[str]:
    """What there is of runs: processes that are no daemons of a living agent, files of runs, shared memory."""
    agent = ask_agent(console)
    spared = {daemon.pid for daemon in agent.daemons} if agent else set[int]()
    processes = {line for line in console.leftovers() if int(line.split()[0]) not in spared}
    return processes | {
        str(path) for folder in (console.runtime / "runs", console.segments) for path in entries(folder)
    }


def living(console: Console) -> set[str]:
    """The directories of the runs that live."""
    agent = ask_agent(console)
    return {run.directory for run in agent.runs} if agent else set()


def entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


def ask_agent(console: Console) -> Runs | None:
    """What the agent knows; None if there is none right now."""
    try:
        link = connect(console.runtime / "agent.sock", to_client, "the agent")
    except ArgosyError:
        return None
    try:
        answer = ask(link, ListRuns(), timeout_s=10.0)
    except ArgosyError:
        return None
    finally:
        link.close()
    assert isinstance(answer, Runs)
    return answer


@contextmanager
def cold_terminal(cwd: Path, python: str = sys.executable) -> Generator[Console]:
    """Open a terminal in `cwd` that has no daemons yet; when it is left, nothing that it started may remain."""
    home = make_home()
    console = home.console(cwd, python)
    try:
        yield console
    finally:
        try:
            close(console)
        finally:
            shutil.rmtree(home.base, ignore_errors=True)


def end_commands(console: Console) -> None:
    for command in console.started:
        if command.poll() is None:
            command.terminate()
            command.wait(PATIENCE_S)


def close(console: Console) -> None:
    """Stop everything; fail if a process or a segment is left."""
    end_commands(console)
    stopped = console.argosy("stop", "--all")
    try:
        until(lambda: not console.leftovers(), "all processes gone", 200.0)
    except AssertionError:
        left = console.leftovers()
        for line in left:
            os.kill(int(line.split()[0]), signal.SIGKILL)
        raise AssertionError("left behind:\n" + "\n".join(left) + f"\n{stopped.text}") from None
    assert stopped.code == 0, stopped.text
    lines = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        assert not Path(mount, own, console.segments.name).exists(), "left behind: a cgroup"
    segments = console.segments
    assert not segments.exists(), f"left behind: {[str(path) for path in segments.rglob('*')] or segments}"


def is_foreign(name: str) -> bool:
    """Variables of an outer launcher, of pytest or make, which a user's terminal does not have."""
    if name in ("ARGOSY_SANDBOX", "ARGOSY_NATIVE"):
        return False
    launchers = ("ARGOSY_", "TORCHELASTIC_", "PYTEST_", "SLURM_", "MASTER_", "OMP_", "MAKE", "MFLAGS")
    return name.startswith(launchers) or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
