"""Storage for `dcp.save` and `dcp.load` of scripts that keep their checkpoints with torch.

    dcp.save(state, storage_writer=argosy.checkpoint.DcpWriter(path))
    dcp.load(state, storage_reader=argosy.checkpoint.DcpReader(path))

D1  `path` holds a whole checkpoint or, before the first save has ended, nothing: a save is written elsewhere, made
    durable, and renamed. A crash in between leaves the checkpoint before it, at `path` or at `path.old`.
D2  Each file's bytes are compared with the digest that was taken when it was written, before a tensor is read from it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from argosy.checkpoint.format import NO_FILE, CorruptShard, StepNotFound

DIGESTS = "digests.json"
METADATA = ".metadata"


class DcpWriter(FileSystemWriter):
    """A `storage_writer` whose checkpoints appear whole or not at all. All ranks write to one file system."""

    def __init__(self, path: str | Path, **how: Any) -> None:
        self._target = Path(path)
        super().__init__(_new(self._target), **how)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._target = Path(checkpoint_id)
        super().reset(_new(self._target))

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan  # The coordinator makes the directory, before any rank writes.

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        new = _new(self._target)
        shutil.rmtree(new, ignore_errors=True)  # A save that was broken off.
        new.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        """Write this rank's files, and the digests of them."""
        found = super().write_data(plan, planner)
        names = sorted({each.storage_data.relative_path for each in found.wait()})
        new = _new(self._target)
        _write(new / f"__{plan.storage_data.prefix}{DIGESTS}", {name: _digest(new / name) for name in names})
        return found

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Commit: the new directory takes the place of the old one."""
        super().finish(metadata, results)
        new, old = _new(self._target), self._target.with_name(self._target.name + ".old")
        digests = {METADATA: _digest(new / METADATA)}
        for path in sorted(new.glob(f"__*{DIGESTS}")):
            digests |= json.loads(path.read_text())
            path.unlink()
        _write(new / DIGESTS, digests)
        _sync(new)
        shutil.rmtree(old, ignore_errors=True)
        if self._target.exists():
            self._target.rename(old)
        new.rename(self._target)
        _sync(self._target.parent)
        shutil.rmtree(old, ignore_errors=True)


class DcpReader(FileSystemReader):
    """A `storage_reader` that reads only bytes which are what `DcpWriter` wrote."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(_whole(Path(path)))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(_whole(Path(checkpoint_id)) if checkpoint_id else None)

    def read_metadata(self, *words: Any, **how: Any) -> Metadata:
        """Raises:
        StepNotFound: there is no whole checkpoint.
        CorruptShard: the description of the tensors is damaged.
        """
        if not (Path(self.path) / DIGESTS).is_file():
            raise StepNotFound(f"no whole checkpoint in {self.path}")
        self._check([METADATA])
        return super().read_metadata(*words, **how)

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Raises:
        CorruptShard: a file is damaged; no tensor of this rank has changed.
        """
        self._check(sorted({self.storage_data[each.storage_index].relative_path for each in plan.items}))
        return super().read_data(plan, planner)

    def _check(self, names: Iterable[str]) -> None:
        directory = Path(self.path)
        digests = json.loads((directory / DIGESTS).read_text())
        for name in names:
            path = directory / name
            expected, actual = digests.get(name, ""), _digest(path) if path.is_file() else NO_FILE
            if expected != actual:
                raise CorruptShard(str(path), "the file", expected, actual)


def _new(target: Path) -> Path:
    return target.with_name(target.name + ".new")


def _whole(path: Path) -> Path:
    """The checkpoint, or after a crash between two renames the one before it."""
    old = path.with_name(path.name + ".old")
    return old if not path.exists() and old.exists() else path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write(path: Path, digests: dict[str, str]) -> None:
    with path.open("w") as file:
        json.dump(digests, file)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
