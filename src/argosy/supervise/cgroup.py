"""One cgroup leaf per rank, where they are writable: ending it ends every descendant, however it tried to hide.

Without cgroups the rank's process group is killed, and what carries its mark in the environment.
"""

import contextlib
import hashlib
import os
import select
import signal
import time
from collections.abc import Mapping, Set
from pathlib import Path

MARK = "ARGOSY_MARK"
_LEAVE_S = 2.0
KILLED_S = 1.0
"""How long those that were killed are waited for."""
TITLE = "argosy: rank "
"""How the title of a forked rank begins, and of what it forks."""


def own_cgroup() -> Path | None:
    """The cgroup of this process in the unified hierarchy, or None."""
    try:
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    for mount in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        here = mount / own.lstrip("/")
        if (here / "cgroup.procs").exists() and (mount / "cgroup.controllers").exists():
            return here
    return None


def find_parent(runtime: Path) -> Path | None:
    """A cgroup below our own in which leaves can be made, or None."""
    own = own_cgroup()
    if own is None:
        return None
    parent = own / f"argosy-{os.getuid()}-{hashlib.blake2s(os.fsencode(runtime), digest_size=6).hexdigest()}"
    try:
        parent.mkdir(exist_ok=True)
    except OSError:
        return None
    if (parent / "cgroup.kill").exists():
        return parent
    parent.rmdir()
    return None


def remove_parent(runtime: Path) -> None:
    """End what is left in the cgroup of a runtime that ends, and remove it; the killed take a moment to leave."""
    parent = find_parent(runtime)
    if parent is None:
        return
    kill_leaf(str(parent))
    deadline = time.monotonic() + _LEAVE_S
    while parent.exists() and time.monotonic() < deadline:
        for leaf in [*(path for path in parent.iterdir() if path.is_dir()), parent]:
            with contextlib.suppress(OSError):
                leaf.rmdir()
        time.sleep(0.005)


def make_leaf(parent: Path | None, name: str) -> str:
    """Make the leaf `name`; the empty string where there are no cgroups."""
    if parent is None:
        return ""
    leaf = parent / name.replace("/", "-")
    try:
        leaf.mkdir(exist_ok=True)
    except OSError:
        return ""
    return str(leaf)


def join(leaf: str) -> None:
    """Move this process into the leaf."""
    if leaf:
        with contextlib.suppress(OSError):
            Path(leaf, "cgroup.procs").write_text("0")


def kill_leaf(leaf: str) -> None:
    """Kill everything in the leaf."""
    if leaf:
        with contextlib.suppress(OSError):
            Path(leaf, "cgroup.kill").write_text("1")


def remove_leaf(leaf: str) -> bool:
    """Remove an empty leaf; False while processes are still leaving it."""
    try:
        os.rmdir(leaf)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def kill_marked(marks: Mapping[str, str]) -> None:
    """Kill every process of this user that carries one of the marks; each comes with the rank's progress page.

    The mark is in its environment if it was executed; if it was only forked it still maps the page. Looks at all
    processes: takes milliseconds, or more where there are many. Those killed are gone when this returns, unless the
    kernel holds one for more than a second.
    """
    killed: list[int] = []
    needles = {f"{MARK}={mark}".encode() for mark in marks}
    pages = {os.fsencode(page) for page in marks.values() if page}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                carried = Path(entry.path, "environ").read_bytes().split(b"\0")
                if not needles.isdisjoint(carried) or _maps(Path(entry.path), pages):
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed.append(os.pidfd_open(int(entry.name)))
    deadline = time.monotonic() + KILLED_S
    for pidfd in killed:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        os.close(pidfd)


def _maps(process: Path, files: Set[bytes]) -> bool:
    # The title is asked first: the maps of a process with torch have a thousand lines.
    if not files or not Path(process, "cmdline").read_bytes().startswith(TITLE.encode()):
        return False
    lines = Path(process, "maps").read_bytes().splitlines()
    return not files.isdisjoint(line.split(maxsplit=5)[-1] for line in lines)
