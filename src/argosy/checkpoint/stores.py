"""Where checkpoints are: a run's directory, or an object store by its URL (`s3://bucket/run`)."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from argosy.checkpoint.files import Disk, Files, LocalFiles
from argosy.checkpoint.format import step_of
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
        flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if only_if_new else os.O_TRUNC)
        try:
            fd = os.open(target, flags, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        return True

    def delete(self, path: str) -> None:
        (self.directory / path).unlink(missing_ok=True)


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


def checkpoints_dir(path: str | Path) -> Path:
    """The directory of checkpoints: `checkpoints` of a run's directory, or the given one if it holds steps itself."""
    directory = Path(path)
    inner = directory / CHECKPOINTS
    if inner.is_dir() or not directory.is_dir():
        return inner
    return directory if any(step_of(each.name) is not None for each in directory.iterdir()) else inner


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

        return ObjectStore(str(path), CHECKPOINTS)
    return LocalStore(Path(path) / CHECKPOINTS if new else checkpoints_dir(path))


def open_files(path: str | Path) -> tuple[Files, str]:
    """Open for reading, and say what it is."""
    return open_store(path).files, str(path) if is_url(path) else "disk"
