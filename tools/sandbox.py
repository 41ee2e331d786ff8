"""Run a command whose files go to one directory in /tmp and one in /dev/shm; remove both when it ends.

    python tools/sandbox.py COMMAND...

The command's exit code is passed on, or 1 if it left processes behind: they are named and ended.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HOMES = [Path("/tmp"), Path("/dev/shm")]  # Short: the path of a socket has at most 108 bytes.
LINGER_S = 5.0


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def sweep() -> None:
    """Remove what a killed sandbox of this user left behind."""
    for home in HOMES:
        for path in home.glob("argosy-test-*"):
            match = re.fullmatch(r"argosy-test-(\d+)", path.name)
            if match and not alive(int(match[1])) and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


def inhabitants(mark: str) -> dict[int, str]:
    """Processes that carry the sandbox's mark in their environment."""
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # It ended meanwhile, or belongs to somebody else.
    found.pop(os.getpid(), None)
    return found


def end_inhabitants(mark: str) -> bool:
    """Wait a little for processes to end, end the others; whether there were any."""
    deadline = time.monotonic() + LINGER_S
    while (left := inhabitants(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid, command in left.items():
        print(f"sandbox: left behind, ended now: pid {pid}: {command}", file=sys.stderr, flush=True)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return bool(left)


def main() -> int:
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
        command = subprocess.Popen(sys.argv[1:], env={**os.environ, **variables})
        code = command.wait()
    except KeyboardInterrupt:
        code = 130
    finally:
        if command and command.poll() is None:
            command.terminate()
        left = end_inhabitants(f"ARGOSY_SANDBOX={base}")
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(shared, ignore_errors=True)
    return code if code > 0 else 128 - code if code < 0 else int(left)


if __name__ == "__main__":
    sys.exit(main())
