"""Check a host before ranks are placed on it: memory, disk, accelerators, the run's directory, a command of the user.

Measuring takes milliseconds; only the user's command may take longer. A host that fails is not used.
"""

import shutil
import subprocess
from pathlib import Path

import msgspec

from argosy.supervise import HostNeeds

COMMAND_S = 60.0
MB = 1 << 20
MEMORY_PER_RANK = 128 * MB
"""What a rank needs before its first line."""
SHARED_MEMORY_MIN = 64 * MB
DISK_MIN = 64 * MB


class HostMeans(msgspec.Struct, frozen=True, kw_only=True):
    """What a host has, in bytes; `directory` is whether it sees the run's."""

    memory: int
    shared_memory: int
    disk: int
    accelerators: int
    directory: bool


def measure_host(needs: HostNeeds, place: Path, accelerators: int) -> HostMeans:
    """Look at this host, whose sockets will be below `place`."""
    import psutil  # It takes time.

    shared = Path("/dev/shm")
    existing = next(path for path in (place, *place.parents) if path.exists())
    return HostMeans(
        memory=psutil.virtual_memory().available,
        shared_memory=shutil.disk_usage(shared).free if shared.exists() else 0,
        disk=shutil.disk_usage(existing).free,
        accelerators=accelerators,
        directory=not needs.directory or Path(needs.directory, "run.json").exists(),
    )


def judge_host(needs: HostNeeds, state: HostMeans) -> str:
    """Why this host cannot be used; empty if it can. Pure."""
    wanted = [
        ("memory available", state.memory, MEMORY_PER_RANK * needs.ranks),
        ("room in /dev/shm", state.shared_memory, SHARED_MEMORY_MIN),
        ("room in /tmp", state.disk, DISK_MIN),
    ]
    for what, has, least in wanted:
        if has < least:
            return f"it has {has // MB} MB of {what}, and needs {least // MB}"
    if state.accelerators < needs.accelerators:
        return f"it has {state.accelerators} accelerators, and needs {needs.accelerators}"
    if not state.directory:
        return f"the run's directory is not shared with it: {needs.directory}"
    return ""


def check_host(needs: HostNeeds, place: Path, accelerators: int) -> str:
    """Why this host cannot be used; empty if it can."""
    return judge_host(needs, measure_host(needs, place, accelerators)) or (_try(needs.command) if needs.command else "")


def _try(command: str) -> str:
    try:
        ended = subprocess.run(
            command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S
        )
    except subprocess.TimeoutExpired:
        return f"its check did not end within {COMMAND_S:.0f} s: {command}"
    if ended.returncode == 0:
        return ""
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    return f"its check failed ({ended.returncode}): {lines[-1][:200] if lines else command}"
