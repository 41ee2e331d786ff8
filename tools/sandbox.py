"""Run a command whose files go to one directory in /tmp and one in /dev/shm; remove both when it ends.

    python tools/sandbox.py [--alone] COMMAND...

The command's exit code is passed on, or 1 if it left processes behind: they are named and ended. With `--alone` it
first waits until no other such command runs on this machine: two test suites at once would only slow each other down.
"""

import ctypes
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HOMES = [Path("/tmp"), Path("/dev/shm")]  # Short: the path of a socket has at most 108 bytes.
LOCK = Path(os.environ.get("ARGOSY_SUITE_LOCK", "/tmp/argosy-suite.lock"))
LINGER_S = 5.0
SWEEP_AFTER_S = 60.0
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of <linux/prctl.h>."""


def claim(path: Path) -> int | None:
    """Lock a sandbox's directory until this process ends; None if another one holds it."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        return None
    return directory


def wait_alone(command: list[str]) -> int:
    """Lock this machine's suites until this process ends, however it ends; say for whom we wait."""
    with suppress(OSError):  # It is there already, or will be.
        os.close(os.open(LOCK, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o644))
    lock = os.open(LOCK, os.O_RDONLY)
    told = ""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = LOCK.read_text().strip()
        if holder != told:
            print(f"sandbox: waiting for another suite on this machine: {holder}", file=sys.stderr, flush=True)
            told = holder
        time.sleep(0.5)
    with suppress(OSError):  # Another user's file: it tells of an earlier holder.
        LOCK.write_text(f"pid {os.getpid()}, {shlex.join(command)} in {os.getcwd()}, since {time.strftime('%H:%M')}\n")
    return lock


def sweep() -> None:
    """Remove what a killed sandbox of this user left behind."""
    for path in [path for home in HOMES for path in home.glob("argosy-test-*")]:
        status = path.lstat()
        # A young one may be about to be locked.
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < SWEEP_AFTER_S:
            continue
        if (directory := claim(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(directory)


def inhabitants(mark: str) -> dict[int, str]:
    """Processes that carry the sandbox's mark in their environment, and orphans, which have none while they start."""
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            orphan = int(parent) == os.getpid() and state != "Z"
            if orphan or mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # It ended meanwhile, or belongs to somebody else.
    found.pop(os.getpid(), None)
    return found


def linger(mark: str) -> dict[int, str]:
    """Wait a little for processes to end; those that did not."""
    deadline = time.monotonic() + LINGER_S
    while (left := inhabitants(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def end_inhabitants(mark: str) -> bool:
    """Wait a little for processes to end, end the others; whether there were any."""
    left = linger(mark)
    for pid, command in left.items():
        print(f"sandbox: left behind, ended now: pid {pid}: {command}", file=sys.stderr, flush=True)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    linger(mark)  # One that is killed takes a moment.
    return bool(left)


def wait_for(command: "subprocess.Popen[bytes]") -> int:
    """Wait for the command, and reap the orphans that end before it; the exit code."""
    while True:
        pid, status = os.wait()
        if pid == command.pid:
            command.returncode = os.waitstatus_to_exitcode(status)
            return command.returncode


def main() -> int:
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)  # Orphans of the command become children of ours.
    words = sys.argv[1:]
    alone = words[:1] == ["--alone"]
    words = words[alone:]
    if alone:
        wait_alone(words)
    sweep()
    name = f"argosy-test-{os.getpid()}"
    base, shared = (home / name for home in HOMES)
    variables = {
        "ARGOSY_SANDBOX": str(base),
        "ARGOSY_RUNTIME_DIR": str(base / "run"),
        "ARGOSY_SHM_DIR": str(shared),
        "XDG_STATE_HOME": str(base / "state"),
        "XDG_CACHE_HOME": str(base / "cache"),
        "TMPDIR": str(base / "tmp"),
        "ARGOSY_LINGER_S": "0",
        "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} --basetemp={base}/t".strip(),
    }
    # Turned into an exception, so that the directories are removed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    command: subprocess.Popen[bytes] | None = None
    left = False
    try:
        shared.mkdir(mode=0o700)
        for path in [base, base / "run", base / "tmp"]:
            path.mkdir(mode=0o700)
        locks = [claim(base), claim(shared)]
        assert None not in locks
        command = subprocess.Popen(words, env={**os.environ, **variables})
        code = wait_for(command)
    except KeyboardInterrupt:
        code = 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # Whoever is impatient must not keep the files.
        if command and command.poll() is None:
            command.terminate()
        left = end_inhabitants(f"ARGOSY_SANDBOX={base}")
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(shared, ignore_errors=True)
    return code if code > 0 else 128 - code if code < 0 else int(left)


if __name__ == "__main__":
    sys.exit(main())
