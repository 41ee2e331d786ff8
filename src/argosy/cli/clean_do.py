"""Remove what `plan_cleaning` decided.

A run's files are removed one by one, as they were listed: a file that appears meanwhile stays.
Links are never followed.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

import msgspec

from argosy.cli.clean_find import living_runs, runtime_dirs, why_alive, why_shared
from argosy.cli.clean_plan import Removal
from argosy.core import ArgosyError, DeadlinePassed
from argosy.fabric import made_directories, state_dir
from argosy.supervise import Owner, Shutdown, ask, connect_agent, forget_run, is_runtime_file, lock_runtime

QUIT_S = 15.0


def remove(removal: Removal) -> str:
    """Do what was decided; returns why it could not be done, or ""."""
    path = Path(removal.item.path)
    try:
        match removal.item.kind:
            case "run":
                return _remove_run(path, [file.path for file in removal.files], whole=removal.action == "remove")
            case "daemons":
                return _stop_daemons(path)
            case "leftover" if path in runtime_dirs():
                return _remove_runtime(path)
            case "leftover" if (path / "cgroup.procs").exists():
                for folder in (*(each for each in path.iterdir() if each.is_dir()), path):
                    folder.rmdir()  # The kernel refuses while a process is in it.
            case _:
                shutil.rmtree(path)
    except OSError as error:
        return f"{error.strerror}: {error.filename or path}"
    except ArgosyError as error:
        return str(error)
    return ""


def remove_empty() -> None:
    """Remove index entries of runs that are gone, and directories of Argosy's that are empty."""
    folders = [state_dir() / "runs", state_dir()]
    with contextlib.suppress(OSError):
        for entry in folders[0].iterdir():
            if not Path(os.fsdecode(entry.read_bytes()), "run.json").exists():
                entry.unlink(missing_ok=True)
    if "ARGOSY_RUNTIME_DIR" not in os.environ:
        folders.append(Path(f"/tmp/argosy-{os.getuid()}"))
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove_run(directory: Path, files: list[str], *, whole: bool) -> str:
    """Remove the files that were listed, then empty folders; last the claim on the directory."""
    if alive := why_alive(directory):  # It may have been launched again while the user was asked.
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
        pass  # A full disk is a reason to clean.
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
    """The folders that files were removed from, or all if nothing stays; deepest first."""
    found = {real / folder for folder in known - {"."}}
    found |= {path for path in (real / "logs").glob("*") if path.name.isdecimal() and not path.is_symlink()}
    if whole:
        for top, names, _ in os.walk(real):
            found |= {Path(top, name) for name in names if not Path(top, name).is_symlink()}
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def _stop_daemons(runtime: Path) -> str:
    """Stop idle daemons, and wait until they are gone."""
    if living_runs(runtime) != {}:
        return "a run began meanwhile"
    link = connect_agent(runtime)
    ask(link, Shutdown("argosy clean"))
    link.close()
    deadline = time.monotonic() + QUIT_S
    while (runtime / "warden.lock").exists():
        if time.monotonic() > deadline:
            raise DeadlinePassed("the end of the warden", QUIT_S)
        time.sleep(0.01)
    return ""


def _remove_runtime(runtime: Path) -> str:
    """Remove the directory of killed daemons; their lock is held meanwhile, so that no new one starts in it."""
    if strangers := [name for name in os.listdir(runtime) if not is_runtime_file(name)]:
        return f"it holds a file that Argosy did not write: {strangers[0]}"
    lock = lock_runtime(runtime)
    if lock is None and (runtime / "warden.lock").exists():
        return "a warden started meanwhile"
    made = made_directories(runtime)
    try:
        for path in sorted(runtime.iterdir(), key=lambda path: path.name == "warden.lock"):  # The lock last.
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()
    finally:
        if lock is not None:
            os.close(lock)
    return ""
