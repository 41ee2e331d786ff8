"""The directories of Argosy that belong to no run: sockets, rings, the index of runs, caches."""

import contextlib
import hashlib
import os
import stat
from functools import cache
from pathlib import Path

import argosy
from argosy.core import ConfigError

SOCKET_PATH_MAX = 107


@cache
def build_id() -> str:
    """The version, and in a source tree a digest of its files: daemons of other code are not reused."""
    package = Path(argosy.__file__).parent
    if "site-packages" in package.parts or "dist-packages" in package.parts:
        return argosy.__version__
    digest = hashlib.blake2s(digest_size=4)
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.name} {path.stat().st_mtime_ns}".encode())
    return f"{argosy.__version__}+{digest.hexdigest()}"


def runtime_dir() -> Path:
    """The private directory of this user's daemons, made if missing: `/tmp/argosy-$UID/<allocation>-<version>`.

    Raises:
        ConfigError: it belongs to another user, or its path is too long for a socket.
    """
    given = os.environ.get("ARGOSY_RUNTIME_DIR")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")  # A requeued job must not recall what it was.
    allocation = os.environ.get("SLURM_JOB_ID", "local") + (f".{restarts}" if restarts != "0" else "")
    path = Path(given) if given else Path(f"/tmp/argosy-{os.getuid()}") / f"{allocation}-{build_id()}"
    if len(os.fsencode(path / "zygote-0123456789abcdef.sock")) > SOCKET_PATH_MAX:
        raise ConfigError(
            f"the runtime directory's path is too long for a socket: {path}",
            hint="set ARGOSY_RUNTIME_DIR to a shorter path on a local disk",
        )
    make_runtime(path)
    for directory in [path] if given else [path.parent, path]:
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigError(
                f"the runtime directory is not yours: {directory}", hint="remove it, or set ARGOSY_RUNTIME_DIR"
            )
        if status.st_mode & 0o077:
            directory.chmod(0o700)
    return path


def make_runtime(runtime: Path) -> None:
    """Make a runtime directory if it is missing, and note in it what was made."""
    missing = [path for path in (runtime, *runtime.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    if missing:
        with contextlib.suppress(OSError):  # A full disk: then the directory stays.
            (runtime / "made").write_bytes(b"\n".join(os.fsencode(path) for path in missing))


def made_directories(runtime: Path) -> list[Path]:
    """The directories that are Argosy's to remove when the runtime directory is not used any more, innermost first."""
    home = Path(f"/tmp/argosy-{os.getuid()}")
    if runtime.parent == home:
        return [runtime, home]
    with contextlib.suppress(OSError):
        return [Path(os.fsdecode(line)) for line in (runtime / "made").read_bytes().splitlines()]
    return []


def shared_memory_path(runtime: Path) -> Path:
    """The directory of this runtime's shared-memory files, whether it exists or not."""
    digest = hashlib.blake2s(os.fsencode(runtime), digest_size=6).hexdigest()
    return Path(os.environ.get("ARGOSY_SHM_DIR", "/dev/shm")) / f"argosy-{os.getuid()}-{digest}"


def shared_memory_dir(runtime: Path) -> Path:
    """The directory of this runtime's shared-memory files, made if missing."""
    path = shared_memory_path(runtime)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.lstat().st_uid != os.getuid() or path.is_symlink():
        raise ConfigError(f"the shared-memory directory is not yours: {path}")
    return path


def state_dir() -> Path:
    """The directory of the index of runs."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "argosy"


def cache_dir() -> Path:
    """A directory for files that may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "argosy"


def sync_directory(path: Path) -> None:
    """Make the file names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
