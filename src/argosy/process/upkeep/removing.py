"""Remove what `plan_cleaning` decided.

A run's files go one by one, as they were listed: what appears meanwhile stays. Links are never followed.
"""

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

import msgspec

from argosy.core import ArgosyError, DeadlinePassed
from argosy.fabric import state_dir
from argosy.process.host.messages import Shutdown
from argosy.process.run.rundir import Owner, forget_run
from argosy.process.terminal.client import ask, connect_agent
from argosy.process.upkeep.cleaning import Removal
from argosy.process.upkeep.remains import dead_cgroups, living_runs, lock_runtime, why_alive, why_shared

QUIT_S = 15.0
_RUNTIME_FILE = re.compile(r"(warden|agent|zygote-\w+)\.\w+|keeper-[\w-]+\.sock(\.\w+)?|exits|lifeline|runs")


def remove(removal: Removal) -> str:
    """Do what was decided; returns why it could not be done, or ""."""
    try:
        match removal.kind:
            case "run":
                return _remove_run(Path(removal.path), removal.files, whole=removal.action == "remove")
            case "daemons":
                return _stop_daemons(Path(removal.path))
            case "runtime":
                return _remove_runtime(Path(removal.path))
            case "segments" | "cache":
                shutil.rmtree(removal.path)
            case "cgroups":
                for group in dead_cgroups():
                    for folder in (*(path for path in group.iterdir() if path.is_dir()), group):
                        folder.rmdir()  # The kernel refuses while anybody is in it.
            case "index":
                Path(removal.path).unlink(missing_ok=True)
    except OSError as error:
        return f"{error.strerror}: {error.filename or removal.path}"
    except ArgosyError as error:
        return str(error)
    return ""


def remove_empty() -> None:
    """Remove the directories around what was removed, if nothing is in them any more."""
    folders = [state_dir() / "runs", state_dir()]
    if "ARGOSY_RUNTIME_DIR" not in os.environ:
        folders.append(Path(f"/tmp/argosy-{os.getuid()}"))
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove_run(directory: Path, files: list[str], *, whole: bool) -> str:
    """Remove the files that were listed, then the folders that are empty; last the claim on the directory."""
    if alive := why_alive(directory):  # It may have been launched again while a person was asked.
        return alive
    claim = directory / "owner.json"
    claim.unlink(missing_ok=True)
    # A launch that comes now is refused for as long as this process exists: see RunDir.claim.
    owner = Owner(os.uname().nodename, f"/proc/{os.getpid()}", "argosy clean")
    try:
        with open(claim, "xb", buffering=0) as file:
            file.write(msgspec.json.encode(owner))
    except FileExistsError:
        return "a launch began meanwhile"
    except OSError:
        pass  # A full disk is why one cleans.
    trouble = ""
    real = directory.resolve()
    folders = {str(parent) for path in files for parent in Path(path).parents}
    folders |= {"logs", "incidents"}  # Also where they are empty.
    within = {folder for folder in folders if (real / folder).resolve() == real / folder}
    for path in files:
        if str(Path(path).parent) in within and path != "owner.json":
            try:
                (real / path).unlink(missing_ok=True)
            except OSError as error:
                trouble = f"{error.strerror}: {path}"
    for folder in _folders(real, within, whole):
        with contextlib.suppress(OSError):
            folder.rmdir()
    claim.unlink(missing_ok=True)
    if not (directory / "run.json").exists():
        forget_run(directory)
        if not why_shared(directory):
            with contextlib.suppress(OSError):
                directory.rmdir()
                if directory.parent.name == "runs":
                    directory.parent.rmdir()
    return trouble


def _folders(real: Path, known: set[str], whole: bool) -> list[Path]:
    """The folders that files were removed from, or all if nothing shall stay; deepest first."""
    found = {real / folder for folder in known - {"."}}
    found |= {path for path in (real / "logs").glob("*") if path.name.isdecimal() and not path.is_symlink()}
    if whole:
        for top, names, _ in os.walk(real):
            found |= {Path(top, name) for name in names if not Path(top, name).is_symlink()}
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def _stop_daemons(runtime: Path) -> str:
    """Ask idle daemons to go, and wait until they have."""
    if living_runs(runtime) != {}:
        return "a run began meanwhile"
    link = connect_agent(runtime)
    ask(link, Shutdown("argosy clean"))
    link.close()
    deadline = time.monotonic() + QUIT_S
    while runtime.exists():
        if time.monotonic() > deadline:
            raise DeadlinePassed("the end of the warden", QUIT_S)
        time.sleep(0.01)
    return ""


def _remove_runtime(runtime: Path) -> str:
    """Remove what dead daemons left; their lock is held meanwhile, so that no new one starts in it."""
    if strangers := [name for name in os.listdir(runtime) if not _RUNTIME_FILE.fullmatch(name)]:
        return f"it holds what Argosy did not write: {strangers[0]}"
    lock = lock_runtime(runtime)
    if lock is None and (runtime / "warden.lock").exists():
        return "a warden started meanwhile"
    try:
        doomed = runtime.with_name(f"{runtime.name}.{os.getpid()}")
        runtime.rename(doomed)
        shutil.rmtree(doomed)
    finally:
        if lock is not None:
            os.close(lock)
    return ""
