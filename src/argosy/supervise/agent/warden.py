"""The warden: the tiny process that outlives everything else of Argosy on a host.

It starts and restarts the agent, starts zygotes and executed ranks, reaps what becomes an orphan, and keeps
descriptors on a shelf for the next agent. It holds no user code, no torch, and decides nothing.

W1  One warden per runtime directory: a lock on `warden.lock` says who.
W2  The agent is restarted whenever it ends before `Quit`.
W3  After `Quit` no descendant, no zygote of a killed warden, and no file of the runtime directory is left; nor the
    directory itself, if Argosy made it.
W4  It serves its own directory. A directory that was removed is never written to again, nor is a new one at its path.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import sys
import time
from collections import deque
from pathlib import Path

import setproctitle

from argosy.control import AGENT_DEATHS_MAX, agent_delay_s
from argosy.core import ArgosyError, RankId
from argosy.fabric import Link, accept, listen, made_directories, peer_credentials, shared_memory_dir
from argosy.supervise.cgroup import remove_parent
from argosy.supervise.daemons import daemon_argv, is_runtime_file
from argosy.supervise.environment import open_environment
from argosy.supervise.lifeline import Lifeline
from argosy.supervise.messages import (
    Attach,
    Attached,
    Child,
    ChildExited,
    Drop,
    Forked,
    ForkFailed,
    Hold,
    ProcessId,
    Quit,
    Spawn,
    ToWarden,
    to_warden,
)
from argosy.supervise.processes import open_process, process_id
from argosy.supervise.rank.prepare_child import reset_signals, settle
from argosy.supervise.rank.reaper import Reaper

_PR_SET_CHILD_SUBREAPER = 36
_QUIT_S = 5.0


class Warden:
    """The state of the loop: links, children, shelf."""

    def __init__(self, runtime: Path, agent_pid: int) -> None:
        self.runtime = runtime
        self.reaper = Reaper(runtime, adopts=True)
        self.listener = listen(runtime / "warden.sock")
        self.links: list[Link[ToWarden]] = []
        self.agent: Link[ToWarden] | None = None
        self.agent_pidfd = open_process(process_id(agent_pid)) if agent_pid else None
        """Of an agent that an earlier warden started: it is not our child."""
        self.agent_pid = 0 if self.agent_pidfd is None else agent_pid
        self.agent_deaths: deque[float] = deque(maxlen=AGENT_DEATHS_MAX)
        self.shelf: dict[str, int] = {}
        self.quitting = False
        self.lifeline = Lifeline(runtime)

    def loop(self) -> None:
        """Serve until `Quit`."""
        restart_at: float | None = None
        while not self.quitting:
            if self.agent_pid == 0 and restart_at is None:
                restart_at = time.monotonic() + agent_delay_s(self.agent_deaths, time.monotonic())  # W2
            if restart_at is not None and time.monotonic() >= restart_at:
                if not self.lifeline.in_place:  # W4
                    break
                self.start_agent()
                restart_at = None
            self.wait(None if restart_at is None else max(0.0, restart_at - time.monotonic()))
        self.quit()

    def wait(self, timeout_s: float | None) -> None:
        """Handle one round of events."""
        poller = select.poll()
        poller.register(self.reaper, select.POLLIN)
        poller.register(self.listener, select.POLLIN)
        if self.agent_pidfd is not None:
            poller.register(self.agent_pidfd, select.POLLIN)
        for link in self.links:
            poller.register(link, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
        ready = {fd for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)}
        if self.agent_pidfd is not None and self.agent_pidfd in ready:
            os.close(self.agent_pidfd)
            self.agent_pidfd, self.agent_pid = None, 0
            self.agent_deaths.append(time.monotonic())
        for event in self.reaper.collect():
            if isinstance(event, ChildExited) and event.child.process.pid == self.agent_pid:
                self.agent_pid = 0
                self.agent_deaths.append(time.monotonic())
            else:
                self.tell_agent(event)
        if self.listener.fileno() in ready:
            self.accept()
        for link in [link for link in self.links if link.fileno() in ready]:
            self.serve(link)

    def accept(self) -> None:
        """Take a peer, or turn it away if there is no descriptor for it."""
        try:
            sock = accept(self.listener)
        except OSError as error:
            print(f"warden: turned a peer away: {error.strerror}", file=sys.stderr, flush=True)
            return
        if sock is not None:
            self.links.append(Link(sock, to_warden, f"pid {peer_credentials(sock)[0]}"))

    def serve(self, link: Link[ToWarden]) -> None:
        """Answer what one peer sent; bytes that are no message end that link alone."""
        try:
            link.flush()
            for message, fds in link.receive():
                self.handle(link, message, fds)
        except (ArgosyError, OSError) as error:
            if "closed" not in str(error):
                print(f"warden: dropped {link.peer}: {error}", file=sys.stderr, flush=True)
            link.close()
            self.links.remove(link)
            if link is self.agent:
                self.agent = None

    def handle(self, link: Link[ToWarden], message: ToWarden, fds: list[int]) -> None:
        """Do what is asked; descriptors that nobody keeps are closed."""
        match message:
            case Attach():
                self.attach(link)
            case Hold(name) if len(fds) == 1:
                self.drop(name)
                self.shelf[name] = fds.pop()
            case Drop(name):
                self.drop(name)
            case Spawn():
                self.spawn(link, message, fds)
            case Quit():
                self.quitting = True
            case _:
                pass
        for fd in fds:
            os.close(fd)

    def attach(self, link: Link[ToWarden]) -> None:
        """Take the peer as the agent, and hand it what the one before left."""
        self.agent = link
        if link.peer_pid != self.agent_pid:  # Started by an earlier warden: watched, since it is not our child.
            self.agent_pid = link.peer_pid
            self.agent_pidfd = open_process(process_id(self.agent_pid))
        names = list(self.shelf)
        ranks = [child for child in self.reaper.children.values() if child.what != "agent"]
        for start in range(0, max(1, len(names)), 32):
            part = names[start : start + 32]
            link.send(Attached(part, ranks if start == 0 else [], os.getpid()), [self.shelf[name] for name in part])
        link.send(Attached([], [], 0))

    def drop(self, name: str) -> None:
        """Close what is on the shelf under this name."""
        if (fd := self.shelf.pop(name, None)) is not None:
            os.close(fd)

    def tell_agent(self, event: object) -> None:
        """Say it to the agent if there is one; a later one reads the record of exits."""
        if self.agent is not None:
            with contextlib.suppress(ArgosyError):
                self.agent.send(event)

    def start_agent(self) -> None:
        """Execute a new agent."""
        pid = os.fork()
        if pid == 0:
            _execute_daemon(daemon_argv("agent", str(self.runtime)), self.runtime / "agent.out")
        self.agent_pid = pid
        self.reaper.children[pid] = Child("", RankId("agent", 0), ProcessId(pid, 0), "agent")

    def spawn(self, link: Link[ToWarden], message: Spawn, fds: list[int]) -> None:
        """Execute a program as a rank, or a zygote."""
        if len(fds) != 1 + message.stdin:
            return
        if message.what == "rank" and (known := self.reaper.find(message.run, message.spec.rank)) is not None:
            link.send(Forked(known))  # Asked for by an agent that did not live to hear of it.
            return
        report_in, report_out = os.pipe2(os.O_CLOEXEC)
        warden = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            link.send(ForkFailed(message.run, message.spec.rank, f"fork failed: {error.strerror}"))
            os.close(report_in)
            os.close(report_out)
            return
        if pid == 0:
            _execute(self.runtime, message, fds, report_out, warden)
        os.close(report_out)
        reason = os.read(report_in, 4096).decode(errors="replace")  # Empty as soon as the exec happened.
        os.close(report_in)
        child = Child(message.run, message.spec.rank, process_id(pid), message.what)
        if reason:
            os.waitpid(pid, 0)
            link.send(ForkFailed(message.run, message.spec.rank, reason))
            return
        self.reaper.children[pid] = child
        link.send(Forked(child))

    def quit(self) -> None:
        """End all that is left, then remove every file (W3)."""
        deadline = time.monotonic() + _QUIT_S
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.left():
                with contextlib.suppress(OSError):
                    os.kill(pid, signum)
            while self.left() and time.monotonic() < deadline:
                list(self.reaper.collect())
                time.sleep(0.005)
            deadline = time.monotonic() + _QUIT_S
        if self.lifeline.replaced:  # W4
            return
        made = made_directories(self.runtime)
        remove_parent(self.runtime)
        shutil.rmtree(shared_memory_dir(self.runtime), ignore_errors=True)
        shutil.rmtree(self.runtime / "runs", ignore_errors=True)
        for path in list(self.runtime.glob("*")):
            # By name: the directory may be one that the user chose and uses.
            if is_runtime_file(path.name) and path.name != "runs":
                path.unlink(missing_ok=True)
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()

    def left(self) -> set[int]:
        """What must end before the warden does: its descendants, and zygotes of an earlier one with theirs."""
        roots = [os.getpid(), *self.lifeline.zygotes()]
        return {*roots, *(pid for root in roots for pid in _descendants(root))} - {os.getpid()}


def _execute_daemon(argv: list[str], log: Path) -> None:
    """In a fresh child: become a daemon of ours with its output in `log`. Does not return."""
    try:
        os.setpgid(0, 0)
        reset_signals()
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.execv(argv[0], argv)
    finally:
        os._exit(127)


def _execute(runtime: Path, message: Spawn, fds: list[int], report: int, warden: int) -> None:
    """In a fresh child: become the program. Does not return; what goes wrong is written to `report`.

    If the warden died before the child had joined its cgroup, another may have its place: it ends.
    """
    try:
        spec = message.spec
        if message.what in ("zygote", "hosts"):  # It gets no secrets: they differ between the runs that share it.
            os.setpgid(0, 0)
            variables = {**spec.defaults, **open_environment(fds[0]).variables, **spec.variables}
            for target, path in ((1, spec.out), (2, spec.err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), target)
        else:
            variables = settle(runtime, message.run, spec, fds, keep=report)
        if os.getppid() != warden:
            os._exit(127)
        reset_signals()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # Python's own choices end here.
            signal.signal(number, signal.SIG_DFL)
        os.umask(message.umask)
        os.chdir(message.cwd)
        os.execvpe(message.argv[0], message.argv, variables)
    except BaseException as error:
        reason = f"{error.strerror}: {error.filename or message.argv[0]}" if isinstance(error, OSError) else repr(error)
        os.write(report, reason.encode())
    finally:
        os._exit(127)


def _descendants(pid: int) -> list[int]:
    """All living processes below `pid`; those that ended and wait to be reaped do not count."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                stat = Path(f"/proc/{child}/stat").read_bytes()
                if stat[stat.rindex(b")") + 2 :][:1] != b"Z":
                    found.append(int(child))
                found += _descendants(int(child))
    return found


def _lock(runtime: Path) -> bool:
    """Take the lock of the runtime directory; False if another warden has it. Others hold it for a moment to look."""
    lock = os.open(runtime / "warden.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.005)
    return False


def main() -> None:
    """Become the warden of the runtime directory in argv, unless there is one (W1)."""
    runtime = Path(sys.argv[1])
    os.chdir("/")
    if not _lock(runtime):
        return
    with contextlib.suppress(BlockingIOError):  # systemd-tmpfiles leaves a locked directory alone, however old it is.
        fcntl.flock(os.open(runtime, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    setproctitle.setproctitle(f"argosy: warden {runtime}")
    Warden(runtime, int(sys.argv[2])).loop()
