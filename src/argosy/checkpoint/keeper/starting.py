"""Start a keeper where none listens."""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from argosy.checkpoint.keeper.messages import keeper_decoder
from argosy.core import PeerLost
from argosy.fabric import connect

if TYPE_CHECKING:
    from argosy.checkpoint.keeper.service import Config

START_S = 30.0
"""Until a keeper listens, whoever starts it."""
PEER_START_S = 15.0
SLOW_S = 5.0
"""One that does not listen after so long is looked at, and that is said."""
LOOK_S = 0.01
READY, STOPPED = "ready", "stopped"
KILLED = "it ended without a word, as one that is killed"
Say = Callable[[str], None]


def beside(path: Path, kind: str) -> Path:
    """The keeper's lock and log, next to its socket."""
    return path.with_name(f"{path.name}.{kind}")


@contextmanager
def only_one(path: Path, deadline: float) -> Generator[int, None, None]:
    """Let one process at a time look for a keeper and start it; yields the lock's descriptor.

    Raises:
        PeerLost: another one does so for too long.
    """
    lock = beside(path, "lock")
    while True:
        with open(lock, "w") as file:
            while not _is_locked(file.fileno()):
                if time.monotonic() > deadline:
                    raise PeerLost("the keeper", f"another process starts it, and does not come to an end ({lock})")
                time.sleep(LOOK_S)
            if _is_at(file.fileno(), lock):  # Else an ending keeper has removed it meanwhile.
                yield file.fileno()
                return


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def forget_lock(path: Path) -> None:
    """A keeper has ended: its lock goes too, unless somebody holds it to start another."""
    with contextlib.suppress(OSError), open(beside(path, "lock"), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(file.name)


def ensure(config: "Config", say: Say, within_s: float = START_S) -> None:
    """See to it that a keeper listens.

    Raises:
        PeerLost: it could not be started.
    """
    path = Path(config.socket)
    deadline = time.monotonic() + within_s
    with only_one(path, deadline + SLOW_S) as lock:  # Who starts it says first what is wrong.
        with contextlib.suppress(PeerLost):
            connect(path, keeper_decoder, "the keeper").close()
            return
        if not _start(config, path, lock, deadline, say):
            _start(config, path, lock, deadline, say)


def ensure_peer(config: "Config") -> None:
    """See to it that the second keeper of a keeper listens."""
    ensure(msgspec.structs.replace(config, socket=config.peer, peer=""), lambda _: None, PEER_START_S)


def _start(config: "Config", path: Path, lock: int, deadline: float, say: Say) -> bool:
    """Start one; False if somebody stopped it meanwhile, so that it was killed.

    It holds the lock too until it listens: if its starter is killed meanwhile, nobody starts a second.
    """
    package = str(Path(__file__).parents[3])
    # What a rank leaves behind is known by this mark, and killed with it.
    env = {name: value for name, value in os.environ.items() if name != "ARGOSY_MARK"}
    env["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "argosy.checkpoint.keeper", msgspec.json.encode(config).decode(), str(lock)]
    with open(beside(path, "log"), "ab") as log:
        starter = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
            start_new_session=True,
            pass_fds=(lock,),
        )
    try:
        line = _await(starter, deadline, say)
    finally:
        assert starter.stdout is not None
        starter.stdout.close()
        starter.wait()  # It ends as soon as there is a keeper, or was killed.
    if line == STOPPED:
        return False
    if line != READY:
        raise PeerLost("the keeper", f"it did not start: {line or beside(path, 'log').read_text()[-500:] or KILLED}")
    return True


def _await(starter: "subprocess.Popen[bytes]", deadline: float, say: Say) -> str:
    """What a keeper says when it listens, or why it does not; one that does neither is killed."""
    assert starter.stdout is not None
    pid, said, is_slow = starter.pid, b"", False
    slow_at = min(time.monotonic() + SLOW_S, deadline)
    while True:
        left = (deadline if is_slow else slow_at) - time.monotonic()
        if select.select([starter.stdout], [], [], max(left, 0.0))[0]:
            data = os.read(starter.stdout.fileno(), 4096)
            said += data
            lines = said.decode(errors="replace").split("\n")[:-1]
            pid = next((int(line) for line in lines if line.isdigit()), pid)
            answers = [line for line in lines if not line.isdigit()]
            if answers or not data:
                return "".join(answers[:1])
        elif is_slow or _is_stopped(pid):
            is_stopped = _is_stopped(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starter.pid, signal.SIGKILL)  # The session that it was started in.
            if not is_slow and is_stopped:
                say(f"the keeper (pid {pid}) was stopped while it started, and is replaced")
                return STOPPED
            return f"it (pid {pid}) did not listen in time"
        else:
            is_slow = True
            say(f"the keeper (pid {pid}) does not listen yet, after {SLOW_S:g} s; waiting up to {START_S:g} s for it")


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
