"""Where checkpoints are: a run's directory, or an object store by its URL (`s3://bucket/run`)."""

import fcntl
import os
import posixpath
import re
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol

from argosy.checkpoint.files import Disk, Files, LocalFiles
from argosy.checkpoint.format import ROOT, step_of
from argosy.checkpoint.operations import Operation
from argosy.core import ConfigError

CHECKPOINTS = "checkpoints"
Before = Callable[[Operation], None] | None


class Store(Protocol):
    """What a saver needs of a place. Failures are OSErrors; a missing file is FileNotFoundError."""

    name: str
    files: Files

    def perform(self, operations: Iterable[Operation], arena: memoryview | None = None, before: Before = None) -> None:
        """Perform the operations of a save, in order."""
        ...

    def put(self, path: str, data: bytes, *, only_if_new: bool = False) -> bool:
        """Write a small file that need not survive a crash; False if it had to be new and is not."""
        ...

    def delete(self, path: str) -> None: ...

    def alone(self, timeout_s: float) -> AbstractContextManager[bool]:
        """Keep others out who ask for the same, as far as can be: whether it could within the time."""
        ...


class LocalStore:
    """A directory on a disk, or on a network file system that renames atomically."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.name = directory, str(directory)
        self.files: Files = LocalFiles(directory)

    def perform(self, operations: Iterable[Operation], arena: memoryview | None = None, before: Before = None) -> None:
        Disk(self.directory, arena).perform(operations, before)

    def put(self, path: str, data: bytes, *, only_if_new: bool = False) -> bool:
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        whole = target.with_name(f"{target.name}.{os.getpid()}.{get_ident()}.new")
        try:
            whole.write_bytes(data)
            if only_if_new:
                return _linked(whole, target)
            whole.rename(target)
            return True
        finally:
            with suppress(OSError):
                whole.unlink()

    def delete(self, path: str) -> None:
        (self.directory / path).unlink(missing_ok=True)

    @contextmanager
    def alone(self, timeout_s: float) -> Generator[bool, None, None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _locked(fd, timeout_s)
        finally:
            os.close(fd)


def _linked(whole: Path, target: Path) -> bool:
    """Give a file its final name if that is new: a reader never finds half of it."""
    try:
        os.link(whole, target)
    except FileExistsError:
        return False
    except OSError:  # A file system without links.
        try:
            with target.open("xb") as file:
                file.write(whole.read_bytes())
        except FileExistsError:
            return False
    return True


def _locked(fd: int, timeout_s: float) -> bool:
    """Lock a directory among the processes of this host."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:  # Its holder is stopped, perhaps.
                return False
            time.sleep(0.005)
        except OSError:  # A file system without locks.
            return False
        else:
            return True


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


_ONE_SLASH = re.compile(r"(s3a?|gcs|gs|az|abfss?|https?):/(?!/)")


def _plain_url(url: str) -> str:
    """A URL in one of its spellings, so that one place has one name."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    path = posixpath.normpath(key.strip("/")) if key.strip("/") else ""
    return f"{scheme.lower()}://{bucket}/{path}" if path else f"{scheme.lower()}://{bucket}"


def located(path: str | Path) -> str:
    """A place by its whole name, wherever the program goes: a URL, or the directory around that of checkpoints."""
    said: Any = path
    if not isinstance(said, str | os.PathLike) or not str(path):
        raise ConfigError(
            f"a place for checkpoints has a name, a path or URL: {path!r}", hint='"." is the current directory'
        )
    if _ONE_SLASH.match(str(path)):
        raise ConfigError(f"a URL has two slashes: {path}", hint=str(path).replace(":/", "://", 1))
    text = _plain_url(str(path)) if is_url(path) else os.path.abspath(os.path.expanduser(path))
    return os.path.dirname(text) if os.path.basename(text) == CHECKPOINTS else text


def checkpoints_dir(path: str | Path) -> Path:
    """The directory of checkpoints: `checkpoints` of a run's directory, or the given one if it holds steps itself."""
    directory = Path(located(path))
    inner = directory / CHECKPOINTS
    if inner.is_dir() or not directory.is_dir():
        return inner
    return directory if any(step_of(each.name) is not None for each in directory.iterdir()) else inner


def foreign_kind(path: Path) -> str | None:
    """The format of others that a directory or file seems to be in, by names alone: `hf`, `dcp`, `torch`, or None."""
    if path.is_file():
        return "hf" if path.suffix == ".safetensors" else "torch"
    names = {each.name for each in path.iterdir()}
    if names & {CHECKPOINTS, ROOT}:
        return None
    return "dcp" if ".metadata" in names else "hf" if any(name.endswith(".safetensors") for name in names) else None


def open_store(path: str | Path, *, new: bool = False) -> Store:
    """Open a place for saving (`new`: it may not be there yet) or for reading.

    Raises:
        ConfigError: the URL needs the `s3` extra, or none such can be opened.
    """
    if str(path).startswith("file://"):
        plain = str(path).removeprefix("file://")
        raise ConfigError(f"a directory is given by its path, not as {path}", hint=f"say {plain}")
    if is_url(path):
        from argosy.checkpoint.objects import ObjectStore

        return ObjectStore(located(path), CHECKPOINTS)
    return LocalStore(Path(located(path)) / CHECKPOINTS if new else checkpoints_dir(path))


def open_files(path: str | Path) -> tuple[Files, str]:
    """Open for reading, and say what it is."""
    return open_store(path).files, str(path) if is_url(path) else "disk"
