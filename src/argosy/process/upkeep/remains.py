"""Find what ended runs and dead daemons left on this machine, and who is still alive. Changes nothing."""

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from argosy.core import ArgosyError, ConfigError
from argosy.fabric import cache_dir, shared_memory_path, state_dir
from argosy.process.host.messages import ListRuns, Runs
from argosy.process.run.rundir import Owner, indexed_runs, read_record
from argosy.process.terminal.client import ask, connect_agent
from argosy.process.upkeep.cleaning import Found, Leftover, RunRemains, classify

ENTRIES_MAX = 200_000
"""A run's directory with more than this is somebody's disk; what was not looked at counts as not ours."""


# --- who is alive


def runtime_dirs() -> list[Path]:
    """The runtime directories of this user's daemons, alive or not; makes none."""
    if given := os.environ.get("ARGOSY_RUNTIME_DIR"):
        return [Path(given)] if Path(given, "warden.lock").exists() else []
    home = Path(f"/tmp/argosy-{os.getuid()}")
    try:
        status = home.lstat()
    except OSError:
        return []
    if home.is_symlink() or status.st_uid != os.getuid():
        return []
    return sorted(path for path in home.iterdir() if path.is_dir() and not path.is_symlink())


def is_inhabited(runtime: Path) -> bool:
    """Whether a warden holds its lock, or any daemon or rank the lifeline."""
    try:
        lifeline = os.open(runtime / "lifeline", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENOENT):
            return True  # Cannot be told, so better not touched.
    else:
        os.close(lifeline)
        return True
    lock = lock_runtime(runtime)
    if lock is not None:
        os.close(lock)
    return lock is None and (runtime / "warden.lock").exists()


def living_runs(runtime: Path) -> dict[str, str] | None:
    """Directories and names of the runs that live there; None if nobody answers."""
    try:
        link = connect_agent(runtime)
    except ArgosyError:
        return None
    try:
        answer = ask(link, ListRuns(), timeout_s=5.0)
    except ArgosyError:
        return None
    finally:
        link.close()
    return {run.directory: run.name for run in answer.runs} if isinstance(answer, Runs) else None


def why_alive(directory: Path) -> str:
    """Why the run in this directory must not be touched; "" if it is over."""
    try:
        owner = msgspec.json.decode((directory / "owner.json").read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return ""
    if owner.host != os.uname().nodename:
        return f"runs on {owner.host}"
    if not is_inhabited(Path(owner.runtime)):
        return ""
    runs = living_runs(Path(owner.runtime))
    if runs is None:
        return "alive"
    return "alive" if directory.resolve() in {Path(each).resolve() for each in runs} else ""


def lock_runtime(runtime: Path) -> int | None:
    """Take the warden's lock, so that none can start; None if there is one, or never was."""
    try:
        lock = os.open(runtime / "warden.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _in_use() -> tuple[set[Path], set[str]]:
    """Runtime directories in the titles of this user's daemons; shared memory that its processes map."""
    runtimes: set[Path] = set()
    mapped: set[str] = set()
    segment = re.compile(rb"/(argosy-\d+-[0-9a-f]{12})/")
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid != os.getuid():
                continue
            title = Path(entry.path, "cmdline").read_bytes().rstrip(b"\0")
            if match := re.match(rb"argosy: (?:warden|agent) (.+)", title):
                runtimes.add(Path(os.fsdecode(match[1])))
            mapped |= {name.decode() for name in segment.findall(Path(entry.path, "maps").read_bytes())}
    return runtimes, mapped


# --- what there is


def find_runs() -> list[RunRemains]:
    """All runs of the index, oldest first."""
    return [look_at_run(directory) for _, directory in indexed_runs()]


def look_at_run(directory: Path) -> RunRemains:
    """Sort what is below a run's directory by whose it is."""
    record = None
    with contextlib.suppress(ConfigError):
        record = read_record(directory)
    shared = why_shared(directory)
    ours: list[Found] = []
    checkpoints: list[Found] = []
    strangers = 0
    for entry, path in _walk(directory, only_ours=bool(shared)):
        if entry is None:
            strangers += 1
            continue
        file = Found(path, entry.stat(follow_symlinks=False).st_blocks * 512)
        match classify(path, linked=not entry.is_file(follow_symlinks=False)):
            case "ours":
                ours.append(file)
            case "checkpoint":
                checkpoints.append(file)
            case _:
                strangers += 1
    ended_at = record.ended_at if record else None
    return RunRemains(
        name=record.name if record else directory.name,
        directory=str(directory),
        ended_at=ended_at or _changed_at(directory / "events", directory),
        alive=why_alive(directory),
        shared=shared,
        ours=ours,
        checkpoints=checkpoints,
        strangers=strangers,
    )


def why_shared(directory: Path) -> str:
    """Why the directory itself is more than a run's; "" if it is not."""
    if directory.is_symlink():
        return "its directory is a link"
    real, home = directory.resolve(), Path.home().resolve()
    if real == home or real in home.parents:
        return f"its directory is {directory}"
    return "its directory is a disk" if real.is_mount() else ""


def find_leftovers(*, everything: bool = True) -> list[Leftover]:
    """What daemons have or left outside of runs; `everything` adds the index and the cache."""
    named, mapped = _in_use()
    found: list[Leftover] = []
    living: set[Path] = set()
    for runtime in sorted({*runtime_dirs(), *named}):
        if runtime in named or is_inhabited(runtime):
            living.add(runtime)
            if runtime in runtime_dirs():
                found.append(_look_at_daemons(runtime))
        else:
            found.append(_leftover("runtime", runtime))
    owned = {shared_memory_path(runtime) for runtime in living}
    for path in _segments():
        if path not in owned and path.name not in mapped:
            found.append(_leftover("segments", path))
    if "ARGOSY_RUNTIME_DIR" not in os.environ and (cgroups := dead_cgroups()):
        found.append(Leftover(kind="cgroups", path=str(cgroups[0].parent / f"argosy-{os.getuid()}-*")))
    if everything:
        found += [_leftover("index", entry) for entry in _dangling()]
        if cache_dir().is_dir() and not cache_dir().is_symlink():
            found.append(_leftover("cache", cache_dir()))
    return found


def _look_at_daemons(runtime: Path) -> Leftover:
    runs = living_runs(runtime)
    alive = "its agent does not answer" if runs is None else ""
    if runs:
        alive = f"serve {', '.join(runs.values())}"
    return Leftover(kind="daemons", path=str(runtime), alive=alive)


def _leftover(kind: Literal["runtime", "segments", "index", "cache"], path: Path) -> Leftover:
    size = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry, _ in _walk(path) if entry)
    return Leftover(kind=kind, path=str(path), bytes=size, since=_changed_at(path))


def _segments() -> list[Path]:
    home = Path(os.environ.get("ARGOSY_SHM_DIR", "/dev/shm"))
    pattern = re.compile(rf"argosy-{os.getuid()}-[0-9a-f]{{12}}")
    with contextlib.suppress(OSError):
        found = [path for path in home.iterdir() if pattern.fullmatch(path.name) and not path.is_symlink()]
        return sorted(path for path in found if path.is_dir() and path.lstat().st_uid == os.getuid())
    return []


def dead_cgroups(below: Path | None = None) -> list[Path]:
    """Cgroups of agents that are gone, with nobody in them; by default below our own."""
    if below is None:
        own = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        mounts = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
        homes = [mount / own[0].lstrip("/") for mount in mounts if own and (mount / "cgroup.controllers").exists()]
    else:
        homes = [below]
    found: list[Path] = []
    for path in [path for home in homes for path in home.glob(f"argosy-{os.getuid()}-*-*")]:
        with contextlib.suppress(OSError):
            inhabited = "populated 1" in (path / "cgroup.events").read_text()
            if not inhabited and not Path("/proc", path.name.rpartition("-")[2]).exists():
                found.append(path)
    return sorted(found)


def _dangling() -> list[Path]:
    """Entries of the index whose run is no more."""
    with contextlib.suppress(OSError):
        entries = sorted((state_dir() / "runs").iterdir())
        return [each for each in entries if not Path(os.fsdecode(each.read_bytes()), "run.json").exists()]
    return []


def _walk(top: Path, *, only_ours: bool = False) -> Iterator[tuple[os.DirEntry[str] | None, str]]:
    """Files below `top` with their relative paths; None for what was not looked into."""
    pending, seen = [""], 0
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(top / folder), key=lambda entry: entry.name)
        except OSError:
            if (top / folder).is_dir():
                yield None, folder
            continue
        for entry in entries:
            path = f"{folder}{entry.name}"
            seen += 1
            if not entry.is_dir(follow_symlinks=False):
                yield entry, path
            elif seen > ENTRIES_MAX or (only_ours and path.split("/")[0] not in ("logs", "incidents")):
                yield None, path
            else:
                pending.append(f"{path}/")


def _changed_at(*paths: Path) -> float:
    for path in paths:
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return 0.0
