"""Find what ended runs and killed daemons left on this machine, and what is still alive. Changes nothing."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from argosy.cli.clean_plan import File, Item, classify
from argosy.core import ArgosyError, ConfigError
from argosy.fabric import cache_dir, shared_memory_path
from argosy.supervise import (
    ListRuns,
    Runs,
    ask,
    connect_agent,
    indexed_runs,
    is_inhabited,
    own_cgroup,
    read_owner,
    read_record,
)

ENTRIES_MAX = 200_000
"""A run's directory with more entries is somebody's disk; what was not looked at counts as not Argosy's."""
OUR_FOLDERS = ("logs", "incidents", "metrics", "hosts")
_FOLDER = re.compile(r"argosy-\d+-[0-9a-f]{12}")
"""Shared memory and cgroup of a runtime directory."""


# --- what is alive


def runtime_dirs() -> list[Path]:
    """The runtime directories of this user's daemons, alive or not; makes none."""
    if given := os.environ.get("ARGOSY_RUNTIME_DIR"):
        return [Path(given)] if Path(given, "warden.lock").exists() else []
    home = Path(f"/tmp/argosy-{os.getuid()}")
    with contextlib.suppress(OSError):
        if not home.is_symlink() and home.lstat().st_uid == os.getuid():
            return sorted(path for path in home.iterdir() if path.is_dir() and not path.is_symlink())
    return []


def living_runs(runtime: Path) -> dict[str, str] | None:
    """Directories and names of the runs that live there; None if no agent answers."""
    try:
        link = connect_agent(runtime)
        try:
            answer = ask(link, ListRuns(), timeout_s=5.0)
        finally:
            link.close()
    except ArgosyError:
        return None
    return {run.directory: run.name for run in answer.runs} if isinstance(answer, Runs) else None


def why_alive(directory: Path) -> str:
    """Why the run in this directory must not be touched; "" if it is over."""
    owner = read_owner(directory)
    if owner is None:
        return ""
    if owner.host != os.uname().nodename:
        return f"runs on {owner.host}"
    if not is_inhabited(Path(owner.runtime)):
        return ""
    runs = living_runs(Path(owner.runtime))
    alive = runs is None or directory.resolve() in {Path(each).resolve() for each in runs}
    return "alive" if alive else ""


def _named_runtimes() -> set[Path]:
    """Runtime directories in the titles of this user's daemons."""
    titles = [
        (process.info["cmdline"] or [""])[0] for process in psutil.process_iter(["cmdline"])
    ]  # The rest is padding.
    return {Path(match[1]) for title in titles if (match := re.match(r"argosy: (?:warden|agent) (.+)", title))}


def _mapped_names() -> set[str]:
    """The folders of shared memory from which a process has mapped something: it lives, whatever its title says."""
    return {name for maps in Path("/proc").glob("[0-9]*/maps") for name in _FOLDER.findall(_read(maps))}


# --- what there is


def find_items() -> list[Item]:
    """Daemons, all runs of the index (oldest first), leftovers, the cache."""
    found = [_look_at_daemons(runtime) for runtime in runtime_dirs() if is_inhabited(runtime)]
    found += [look_at_run(directory) for _, directory in indexed_runs()]
    found += find_leftovers()
    if cache_dir().is_dir() and not cache_dir().is_symlink():
        found.append(Item(kind="cache", name=str(cache_dir()), path=str(cache_dir()), ours=_size(cache_dir())))
    return found


def find_leftovers() -> list[Item]:
    """Runtime directories, shared memory and cgroups of daemons that were killed."""
    named = _named_runtimes()
    living = {runtime for runtime in {*runtime_dirs(), *named} if runtime in named or is_inhabited(runtime)}
    paths = [runtime for runtime in runtime_dirs() if runtime not in living]
    names = {shared_memory_path(runtime).name for runtime in living} | _mapped_names()
    paths += _dead_folders(Path(os.environ.get("ARGOSY_SHM_DIR", "/dev/shm")), names)
    if (cgroup := own_cgroup()) is not None:
        given = os.environ.get("ARGOSY_RUNTIME_DIR")
        own = shared_memory_path(Path(given)).name if given else ""  # Cgroups of other runtimes are not ours to judge.
        paths += [path for path in _dead_folders(cgroup, names) if path.name == own or not given]
    return [
        Item(kind="leftover", name=str(path), path=str(path), since=_changed_at(path), ours=_size(path))
        for path in paths
    ]


def _dead_folders(home: Path, living: set[str]) -> list[Path]:
    """The folders of runtimes that are not alive; shared memory and cgroups have the same names."""
    found: list[Path] = []
    for path in sorted(home.glob(f"argosy-{os.getuid()}-*")):
        with contextlib.suppress(OSError):
            ours = _FOLDER.fullmatch(path.name) and path.name not in living
            ours = ours and path.is_dir() and not path.is_symlink() and path.lstat().st_uid == os.getuid()
            if ours and "populated 1" not in _read(path / "cgroup.events"):
                found.append(path)
    return found


def look_at_run(directory: Path) -> Item:
    """Sort what is below a run's directory by whose it is."""
    record = None
    with contextlib.suppress(ConfigError):
        record = read_record(directory)
    shared = why_shared(directory)
    files: dict[str, list[File]] = {"ours": [], "checkpoint": [], "stranger": []}
    for entry, path in _walk(directory, only_ours=bool(shared)):
        size = entry.stat(follow_symlinks=False).st_blocks * 512 if entry else 0
        whose = classify(path, linked=not entry.is_file(follow_symlinks=False)) if entry else "stranger"
        files[whose].append(File(path, size))
    return Item(
        kind="run",
        name=record.name if record else directory.name,
        path=str(directory),
        since=(record.ended_at if record else None) or _changed_at(directory / "events", directory),
        alive=why_alive(directory),
        shared=shared,
        ours=files["ours"],
        checkpoints=files["checkpoint"],
        strangers=len(files["stranger"]),
    )


def why_shared(directory: Path) -> str:
    """Why the directory itself is more than a run's; "" if it is not."""
    if directory.is_symlink():
        return "its directory is a link"
    real, home = directory.resolve(), Path.home().resolve()
    if real == home or real in home.parents:
        return f"its directory is {directory}"
    return "its directory is a disk" if real.is_mount() else ""


def _look_at_daemons(runtime: Path) -> Item:
    runs = living_runs(runtime)
    alive = "the agent does not answer" if runs is None else f"serve {', '.join(runs.values())}" if runs else ""
    return Item(kind="daemons", name=str(runtime), path=str(runtime), alive=alive)


def _size(path: Path) -> list[File]:
    return [File(".", sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry, _ in _walk(path) if entry))]


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
            elif seen > ENTRIES_MAX or (only_ours and path.split("/")[0] not in OUR_FOLDERS):
                yield None, path
            else:
                pending.append(f"{path}/")


def _changed_at(*paths: Path) -> float:
    for path in paths:
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
