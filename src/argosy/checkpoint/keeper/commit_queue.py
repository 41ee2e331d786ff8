"""A keeper's writing: whole versions one after the other, all ranks of one side by side, the newest first."""

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from argosy.checkpoint.arena import Arena, content_of
from argosy.checkpoint.commit_step import Committer
from argosy.checkpoint.format import Draft
from argosy.checkpoint.keeper.life import Place
from argosy.checkpoint.keeper.messages import Hello
from argosy.checkpoint.keeper.shelf import Slot
from argosy.checkpoint.owner import Owner, release, take
from argosy.checkpoint.stores import Store, open_store

Part = tuple[Slot, Arena, int]
"""A slot, its memory, and the descriptor of its draft."""


class _Waiting(NamedTuple):
    name: str
    parts: list[Part]
    is_tagged: bool


class Commits:
    """Called from the keeper's loop only; `later` has the loop make a call."""

    def __init__(
        self,
        place: Place,
        later: Callable[[Callable[[], None]], None],
        say: Callable[[str], None],
        committed: Callable[[str, BaseException | None], None],
    ) -> None:
        self._place, self._later, self._say, self._committed = place, later, say, committed
        self._store: Store | None = None
        self._owner: Owner | None = None
        self._committers: dict[int, Committer] = {}
        self._queue: list[_Waiting] = []
        self._busy: str | None = None
        self._joined: set[int] = set()
        self.size = 0

    @property
    def idle(self) -> bool:
        return self._busy is None and not self._queue

    def join(self, hello: Hello) -> None:
        """A rank will save.

        Raises:
            DirectoryInUse: another living run writes there.
        """
        if self._store is None:
            self._store = open_store(hello.store, new=True)
        if self._owner is None:
            self._owner = take(self._store, "keeper")
            self._place.bind()
        self.size = hello.size
        self._joined.add(hello.rank)
        known = self._committers.get(hello.rank)
        if known is None or known.size != hello.size:
            say = self._from_thread
            known = Committer(self._store, hello.rank, hello.size, tuple(hello.keep), say)
            known.owner = self._owner
            self._committers[hello.rank] = known
        known.keep = tuple(hello.keep)

    @property
    def ranks(self) -> set[int]:
        """Those who save, also if they were lost meanwhile."""
        return self._joined

    def _from_thread(self, text: str) -> None:
        self._later(lambda: self._say(text))

    def leave(self, rank: int) -> None:
        """A saver was closed; with the last one the directory is let go, when all is written."""
        self._joined.discard(rank)
        self._let_go()

    def _let_go(self) -> None:
        if not self._joined and self.idle:
            self.release()

    def release(self) -> None:
        if self._owner is not None and self._store is not None:
            release(self._store, self._owner)
            self._owner = None

    def submit(self, name: str, parts: list[Part], *, is_tagged: bool) -> list[str]:
        """Write a whole version when its turn comes; returns the names of older ones that it overtook."""
        overtaken = [waiting for waiting in self._queue if not waiting.is_tagged]
        self._queue = [waiting for waiting in self._queue if waiting.is_tagged]
        self._queue.append(_Waiting(name, parts, is_tagged))
        if is_tagged:
            for slot, _, _ in parts:
                slot.users += 1  # Its memory may not be taken before it was written.
        self._begin()
        return [waiting.name for waiting in overtaken]

    def _begin(self) -> None:
        while self._busy is None and self._queue:
            waiting = self._queue.pop(0)
            if any(slot.name != waiting.name or slot.phase != "held" for slot, _, _ in waiting.parts):
                continue  # Its memory was needed meanwhile; that was told.
            self._busy = waiting.name
            if not waiting.is_tagged:
                for slot, _, _ in waiting.parts:
                    slot.users += 1
            threading.Thread(target=self._write, args=(waiting,), name="argosy-write", daemon=True).start()

    def _write(self, waiting: _Waiting) -> None:
        """In a thread: commit all ranks of a version."""
        error: BaseException | None = None
        try:
            with ThreadPoolExecutor(len(waiting.parts)) as pool:
                results = [pool.submit(self._commit, part) for part in waiting.parts]
                error = next((e for result in results if (e := result.exception())), None)
        except BaseException as caught:
            error = caught
        self._later(lambda: self._written(waiting, error))
        if error is None and 0 in self._committers:
            self._committers[0].tidy()
        self._later(self._ended)

    def _commit(self, part: Part) -> None:
        slot, arena, fd = part
        draft = msgspec.json.decode(content_of(fd), type=Draft)
        committer = self._committers[slot.rank]
        if committer.size != draft.size:  # Written by a launch of another size.
            committer = Committer(committer.store, draft.rank, draft.size, committer.keep, self._from_thread)
            committer.owner = self._owner
        if self._place.look() != "there":  # L2
            raise FileNotFoundError(errno.ENOENT, "removed or replaced while its keeper lived", committer.store.name)
        committer.commit(draft, arena.view)

    def _written(self, waiting: _Waiting, error: BaseException | None) -> None:
        for slot, _, _ in waiting.parts:
            slot.users -= 1
        self._committed(waiting.name, error)

    def _ended(self) -> None:
        self._busy = None
        self._begin()
        self._let_go()
