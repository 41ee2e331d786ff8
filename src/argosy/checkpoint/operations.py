"""A save as a list of operations: planned as values, so that every crash can be enumerated. Pure.

C1  What loads is bitwise a saved step.
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


def plan_segment(path: str, size: int) -> list[Operation]:
    """Write `size` bytes of the arena as a file, in writes that O_DIRECT takes, and make them durable."""
    writes = [
        Write(path, at, Slice(at, min(WRITE_BYTES, -(-(size - at) // BLOCK) * BLOCK)))
        for at in range(0, size, WRITE_BYTES)
    ]
    room = -(-size // BLOCK) * BLOCK
    return [Create(path), Allocate(path, room), *writes, Truncate(path, size), Sync(path)]


def plan_index(path: str, data: bytes) -> list[Operation]:
    """Write an index; its name appears only when it and its segment are durable, which tells the root."""
    return plan_small(path, data)


def plan_small(path: str, data: bytes) -> list[Operation]:
    """Write a small file under a temporary name, make it durable, give it its name."""
    temporary = f"{path}.tmp"
    return [Create(temporary), Write(temporary, 0, data), Sync(temporary), Rename(temporary, path)]


def plan_rank(directory: str, rank: int, size: int, index: bytes, attempt: int = 0) -> list[Operation]:
    """What a rank does: its segment (none if it has no bytes), then its index.

    After a failure it is planned again with the next `attempt`, under another name: bytes whose sync failed
    are never trusted.
    """
    segment = plan_segment(f"{directory}/{segment_name(rank, attempt)}", size) if size else []
    return [Mkdir(directory), *segment, *plan_index(f"{directory}/{index_name(rank)}", index)]


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
