"""A save as a list of operations: planned as values, so that every crash can be enumerated. Pure.

C1  A step that loads has exactly the saved bits.
C2  Acknowledged means durable.
C3  Nothing that a kept step needs is deleted.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from argosy.checkpoint.format import BLOCK, ROOT, IndexHead, Part, Root, digest, era_of, seal, step_of
from argosy.core import ConfigError

WRITE_BYTES = 8 << 20
SESSION = 8
"""Digits of a directory's name that tell the session; behind them saves are counted."""


class Slice(NamedTuple):
    """Bytes of the arena that holds the snapshot."""

    start: int
    length: int


class Mkdir(NamedTuple):
    path: str


class Create(NamedTuple):
    path: str


class Write(NamedTuple):
    path: str
    offset: int
    data: bytes | Slice


class Allocate(NamedTuple):
    """Reserve room for so many bytes, where the file system can: writes side by side need not make the file longer."""

    path: str
    length: int


class Truncate(NamedTuple):
    path: str
    length: int


class Sync(NamedTuple):
    """fdatasync: the file's bytes and length are durable, its name is not."""

    path: str


class Rename(NamedTuple):
    path: str
    target: str
    replaces: bool = False
    """Whether the target may be there."""


class SyncDir(NamedTuple):
    """fsync of a directory: the names in it are durable."""

    path: str


class Unlink(NamedTuple):
    path: str


class Rmdir(NamedTuple):
    path: str


class Ack(NamedTuple):
    """From here on the step counts as durable."""

    step: int


Operation = Mkdir | Create | Allocate | Write | Truncate | Sync | Rename | SyncDir | Unlink | Rmdir | Ack


class Segment(NamedTuple):
    """A file to be written from an arena, its first bytes perhaps while the snapshot in it is still being made."""

    path: str
    sure: int
    """So many bytes are written whatever the snapshot turns out to be."""
    piece: int = WRITE_BYTES

    @property
    def early(self) -> int:
        """Pieces that end here can be written early. The first cannot: its header says what the file holds."""
        whole = self.sure // self.piece * self.piece
        return whole if whole > self.piece else 0

    def writes(self, start: int, end: int) -> list[Operation]:
        """Writes of the arena's bytes from one border of pieces to the end, in whole blocks, as O_DIRECT takes them."""
        return [
            Write(self.path, at, Slice(at, min(self.piece, blocks(end - at)))) for at in range(start, end, self.piece)
        ]


def blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def plan_start(segment: Segment) -> list[Operation]:
    """What a rank can do of a save before its snapshot is whole."""
    begun: list[Operation] = [Mkdir(segment.path.partition("/")[0])]
    if not segment.early:
        return begun
    writes = segment.writes(segment.piece, segment.early)
    return [*begun, Create(segment.path), Allocate(segment.path, blocks(segment.sure)), *writes]


def plan_rest(segment: Segment, size: int, index_path: str, index: bytes) -> list[Operation]:
    """What a rank does then: the rest of its segment of `size` bytes (none if it has none), then its index.

    After a failure it is planned again under another name: bytes whose sync failed are never trusted.
    """
    path = segment.path
    grown: list[Operation] = [Allocate(path, blocks(size))] if size > segment.sure else []
    if segment.early:
        written = [*grown, *segment.writes(segment.early, size), *segment.writes(0, segment.piece)]
    else:
        written = [Create(path), Allocate(path, blocks(size)), *segment.writes(0, size)]
    whole = [*written, Truncate(path, size), Sync(path)] if size else []
    return [*whole, *plan_small(index_path, index)]


def plan_small(path: str, data: bytes, *, replaces: bool = False) -> list[Operation]:
    """Write a small file under a temporary name, make it durable, give it its name.

    An index has its name only when it and its segment are durable, which tells the root.
    """
    temporary = f"{path}.tmp"
    return [Create(temporary), Write(temporary, 0, data), Sync(temporary), Rename(temporary, path, replaces)]


def segment_name(rank: int, attempt: int = 0) -> str:
    again = f".{attempt}" if attempt else ""
    return f"rank-{rank:05d}{again}.safetensors"


def index_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def plan_root(directory: str, root: Root) -> list[Operation]:
    """What the root does when every index is there. `directory` is below the directory of checkpoints, `.`."""
    return [*plan_small(f"{directory}/{ROOT}", seal(root)), SyncDir(directory), SyncDir("."), Ack(root.step)]


def make_root(root: Root, indexes: Sequence[tuple[str, bytes]]) -> Root:
    """The manifest over the indexes (path and bytes) of all ranks.

    Raises:
        ConfigError: ranks do not agree on what all of them have, so some of it may be written by nobody.
    """
    parts: list[Part] = []
    needs: set[str] = set()
    total = 0
    shared = ""
    for rank, (path, data) in enumerate(indexes):
        parts.append(Part(path, len(data), digest(data)))
        head = msgspec.json.decode(data, type=IndexHead)
        needs.update(head.needs)
        total += head.bytes
        shared = shared or head.shared
        if head.shared != shared:
            raise ConfigError(
                f"rank {rank} has other plain tensors than rank 0; each counts as being on all ranks",
                hint="make what only some ranks have DTensors of these ranks' mesh, or describe it with a layout",
            )
    return msgspec.structs.replace(root, parts=parts, needs=sorted(needs), bytes=total)


def is_under_way(name: str, roots: Collection[str], committed: str) -> bool:
    """Whether a directory is a later save of the session that committed `committed`: its step may be a lower one."""
    session, own = committed.rpartition("-")[2], name.rpartition("-")[2]
    return bool(session) and name not in roots and own[:SESSION] == session[:SESSION] and own > session


def plan_deletions(
    present: Mapping[str, Sequence[str]], roots: Mapping[str, Root], keep: Collection[str]
) -> list[Operation]:
    """Delete the step directories that no kept one needs.

    `present` maps each directory to its files, `roots` the valid ones to their manifest, `keep` names directories.
    A root goes first and durably: a step never looks valid while its bytes are going.
    """
    # A directory without a root may be a save under way: one older than the newest kept step is not.
    newest = max(((roots[name].era, roots[name].step) for name in keep if name in roots), default=(0, -1))
    needed = set(keep) | {need for name in keep if name in roots for need in roots[name].needs}
    operations: list[Operation] = []
    for name in sorted(present):
        step = step_of(name)
        if step is None or name in needed or (name not in roots and (era_of(name), step) >= newest):
            continue
        files = list(present[name])
        if ROOT in files:
            files.remove(ROOT)
            operations += [Unlink(f"{name}/{ROOT}"), SyncDir(name)]
        operations += [Unlink(f"{name}/{file}") for file in sorted(files)]
        operations.append(Rmdir(name))
    return operations
