"""Start a keeper where none listens."""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from argosy.checkpoint.keeper.messages import keeper_decoder
from argosy.core import PeerLost
from argosy.fabric import connect

if TYPE_CHECKING:
    from argosy.checkpoint.keeper.service import Config

START_S = 30.0
"""Time until a keeper listens, including a start by another process."""
LOOK_S = 0.01
READY = "ready"
KILLED = "it ended without a word, as one that is killed"


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


def ensure(config: "Config") -> None:
    """See to it that a keeper listens.

    Raises:
        PeerLost: it could not be started.
    """
    path = Path(config.socket)
    deadline = time.monotonic() + START_S
    with only_one(path, deadline) as lock:
        with contextlib.suppress(PeerLost):
            connect(path, keeper_decoder, "the keeper").close()
            return
        _start(config, path, lock, deadline)


def _start(config: "Config", path: Path, lock: int, deadline: float) -> None:
    """Start one.

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
        line = _await(starter, deadline)
    finally:
        assert starter.stdout is not None
        starter.stdout.close()
        starter.wait()  # It ends as soon as there is a keeper, or was killed.
    if line != READY:
        raise PeerLost("the keeper", f"it did not start: {line or beside(path, 'log').read_text()[-500:] or KILLED}")


def _await(starter: "subprocess.Popen[bytes]", deadline: float) -> str:
    """What a keeper says when it listens, or why it does not; one that says neither in time is killed."""
    assert starter.stdout is not None
    said = b""
    while select.select([starter.stdout], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        data = os.read(starter.stdout.fileno(), 4096)
        said += data
        if b"\n" in said or not data:
            return said.decode(errors="replace").partition("\n")[0]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(starter.pid, signal.SIGKILL)  # The session that it was started in.
    return "it did not listen in time, is it stopped?"
