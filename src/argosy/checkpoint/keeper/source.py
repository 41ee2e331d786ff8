"""Read snapshots from a keeper: what it holds looks like the files of a committed step."""

import mmap
import os
from pathlib import Path

import msgspec
import numpy as np

from argosy.checkpoint.arena import content_of
from argosy.checkpoint.format import BLOCK, CorruptShard, Draft, digest, era_of, root_of
from argosy.checkpoint.keeper.life import known_keepers
from argosy.checkpoint.keeper.messages import FromKeeper, Holdings, Kept, Look, Take, keeper_decoder
from argosy.checkpoint.step_index import Candidate, Step
from argosy.core import PeerLost
from argosy.fabric import Link, connect

ANSWER_S = 3.0
"""A keeper answers at once, if it is not stopped."""
IN_MEMORY = 2.0**62


class ArenaFiles:
    """The arenas of a version, as files."""

    place = ""

    def __init__(self, maps: dict[str, mmap.mmap]) -> None:
        self._maps = maps
        self._addresses: dict[str, int] = {}

    def listdir(self, path: str) -> list[str]:
        return sorted(self._maps)

    def read(self, path: str) -> bytes:
        raise FileNotFoundError(path)

    def size(self, path: str) -> int:
        return len(self._map(path)) - BLOCK

    def address(self, path: str) -> int:
        """Where its bytes lie."""
        if path not in self._addresses:
            array = np.frombuffer(self._map(path), np.uint8)
            self._addresses[path] = array.ctypes.data
        return self._addresses[path]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        data = memoryview(self._map(path))[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def _map(self, path: str) -> mmap.mmap:
        try:
            return self._maps[path]
        except KeyError:
            raise FileNotFoundError(path) from None


class KeeperSource:
    """A keeper that may hold what is looked for."""

    label = "the keeper of this host"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._link: Link[FromKeeper] | None = None

    def candidates(self) -> list[Candidate]:
        """What it holds; nothing if it is dead.

        Raises:
            DeadlinePassed: it does not answer.
        """
        try:
            link = self._connected()
            link.send(Look())
            while not isinstance(answer := link.wait(ANSWER_S)[0], Holdings):
                continue
        except PeerLost:
            return []
        # What is in memory is of the run that lives: newer than files of the same step.
        return [Candidate(era_of(version.name), version.step, IN_MEMORY, version.name) for version in answer.versions]

    def open(self, name: str) -> tuple[ArenaFiles, Step]:
        """Map a version; it stays as it is until `close`.

        Raises:
            CorruptShard: an index is altered, or a part is missing.
            PeerLost, DeadlinePassed: the keeper is gone.
        """
        link = self._connected()
        link.send(Take(name))
        maps: dict[str, mmap.mmap] = {}
        drafts: list[Draft] = []
        while True:
            answer, fds = link.wait(ANSWER_S)
            if isinstance(answer, Holdings):
                break
            if not isinstance(answer, Kept):
                continue
            arena, draft_fd = fds
            try:
                data = content_of(draft_fd)
                if digest(data) != answer.draft_digest:
                    hop = f"rank {answer.rank} in {self.label}"
                    raise CorruptShard(hop, "the index", answer.draft_digest, digest(data))
                draft = msgspec.json.decode(data, type=Draft)
                file = draft.entries[0].file if draft.entries else f"{name}/rank-{answer.rank:05d}"
                maps[file] = mmap.mmap(arena, os.fstat(arena).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
                drafts.append(draft)
            finally:
                os.close(arena)
                os.close(draft_fd)
        if not drafts or len(drafts) != drafts[0].size:
            raise CorruptShard(f"{name} in {self.label}", "the snapshot", "all ranks", f"{len(drafts)} of them")
        return ArenaFiles(maps), step_of_drafts(name, drafts)

    def _connected(self) -> Link[FromKeeper]:
        if self._link is None:
            self._link = connect(self._path, keeper_decoder, self.label)
        return self._link

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def step_of_drafts(name: str, drafts: list[Draft]) -> Step:
    """What all ranks have to commit, as if it were committed."""
    step = Step(name=name, root=root_of(min(drafts, key=lambda draft: draft.rank), saved_at=0.0))
    for draft in drafts:
        step.add(draft)
    return step


def keeper_sources(path: str) -> list[KeeperSource]:
    """The keepers of this host that serve a place."""
    return [KeeperSource(found) for found in known_keepers(path)]
