"""Ship whole versions to a peer keeper, as bytes over a link; what arrives is verified before it counts."""

import queue
import select
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import msgspec

from argosy.checkpoint.arena import Arena, content_of, memory_of
from argosy.checkpoint.format import CorruptShard, Draft, digest
from argosy.checkpoint.keeper.held import Held, verify_arena
from argosy.checkpoint.keeper.messages import Bytes, FromKeeper, Offer, Received, keeper_decoder
from argosy.checkpoint.keeper.shelf import Slot
from argosy.core import ArgosyError, DeadlinePassed, PeerLost
from argosy.fabric import Link, connect

PIECE_BYTES = 4 << 20
ACCEPT_S = 60.0


class Shipper:
    """Sends versions in a thread of its own; while one is on its way only the newest waits."""

    def __init__(
        self,
        path: Path,
        revive: Callable[[], None],
        later: Callable[[Callable[[], None]], None],
        say: Callable[[str], None],
        release: Callable[[list[Slot]], None],
    ) -> None:
        self._path, self._revive, self._later, self._say, self._release = path, revive, later, say, release
        self._jobs: queue.SimpleQueue[tuple[str, list[tuple[Slot, Held]]]] = queue.SimpleQueue()
        Thread(target=self._run, name="argosy-ship", daemon=True).start()

    def submit(self, name: str, pieces: list[tuple[Slot, Held]]) -> None:
        self._jobs.put((name, pieces))

    def _run(self) -> None:
        while True:
            name, pieces = self._jobs.get()
            while not self._jobs.empty():
                self._let_go(pieces)
                name, pieces = self._jobs.get()
            try:
                self._ship(name, pieces)
            except (ArgosyError, OSError) as error:
                text = f"the peer keeper did not take {name}: {error}"
                self._later(lambda text=text: self._say(text))
            self._let_go(pieces)

    def _let_go(self, pieces: list[tuple[Slot, Held]]) -> None:
        slots = [slot for slot, _ in pieces]
        self._later(lambda: self._release(slots))

    def _connected(self) -> Link[FromKeeper]:
        """A link to the peer; one that died is replaced."""
        try:
            return connect(self._path, keeper_decoder, "the peer keeper")
        except PeerLost:
            self._revive()
            return connect(self._path, keeper_decoder, "the peer keeper")

    def _ship(self, name: str, pieces: list[tuple[Slot, Held]]) -> None:
        link = self._connected()
        try:
            for slot, held in pieces:
                assert held.arena is not None
                draft = content_of(held.draft)
                size = msgspec.json.decode(draft, type=Draft).bytes
                link.send(Offer(name, slot.step, slot.rank, slot.size, size, len(draft), held.draft_digest))
                for data in (memoryview(draft), held.arena.view[:size]):
                    for at in range(0, len(data), PIECE_BYTES):
                        link.send(Bytes(bytes(data[at : at + PIECE_BYTES])))
                        drain(link, ACCEPT_S)
                while not isinstance(answer := link.wait(ACCEPT_S)[0], Received):
                    continue
                if answer.fault:
                    raise OSError(5, answer.fault)
        finally:
            link.close()


def drain(link: Link[FromKeeper], timeout_s: float) -> None:
    """Wait until the peer took what is queued, so that no more than a piece is.

    Raises:
        DeadlinePassed: it did not.
        PeerLost: it is gone.
    """
    deadline = time.monotonic() + timeout_s
    while link.wants_write:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("the peer keeper taking bytes", timeout_s)
        poller = select.poll()
        poller.register(link, select.POLLOUT)
        poller.poll(left * 1000)
        link.flush()


class Arriving:
    """One rank's part of a version on its way in."""

    def __init__(self, offer: Offer, slot: int, arena: Arena) -> None:
        self.offer, self.slot, self._arena = offer, slot, arena
        self._draft = bytearray()
        self._at = 0

    def add(self, data: bytes) -> bool:
        """Put the next bytes where they belong; True when all are there."""
        missing = self.offer.draft_bytes - len(self._draft)
        self._draft += data[:missing]
        rest = data[missing:] if missing > 0 else data
        end = min(self._at + len(rest), self.offer.bytes)
        self._arena.map[self._at : end] = rest[: end - self._at]
        self._at = end
        return len(self._draft) == self.offer.draft_bytes and self._at == self.offer.bytes

    def draft_memory(self) -> int:
        return memory_of(bytes(self._draft))

    def fault(self) -> str:
        """What is wrong with what arrived, if anything."""
        if digest(bytes(self._draft)) != self.offer.draft_digest:
            return f"the index of rank {self.offer.rank} changed on its way"
        draft = msgspec.json.decode(bytes(self._draft), type=Draft)
        try:
            verify_arena(draft, self._arena, "on its way to the peer keeper")
        except CorruptShard as error:
            return str(error)
        return ""
