"""The keeper's process: one loop over links to ranks and readers. Policy is in `shelf.py`."""

import os
import queue
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from argosy.checkpoint.arena import Arena, new_memory, room_of
from argosy.checkpoint.format import BLOCK, era_of, step_of
from argosy.checkpoint.keeper.commit_queue import Commits
from argosy.checkpoint.keeper.life import Life, Place, Pulse
from argosy.checkpoint.keeper.messages import (
    Bye,
    Durable,
    Failed,
    Filled,
    FromClient,
    Hello,
    Holdings,
    Kept,
    Lend,
    Lent,
    Look,
    Refused,
    Said,
    Take,
    Torn,
    Version,
    Welcome,
    client_decoder,
)
from argosy.checkpoint.keeper.shelf import Later, Make, Never, Reuse, Slot, choose_slot, mismatch, surplus, versions
from argosy.checkpoint.owner import DirectoryInUse
from argosy.core import ArgosyError
from argosy.fabric import BadFrame, Link, accept, listen

TICK_S = 0.25
END_S = 600.0
REMEMBERED = 64
K = TypeVar("K")
V = TypeVar("V")


class Config(msgspec.Struct, frozen=True):
    """What a keeper is told when it is started."""

    socket: str
    bytes_max: int
    life: Life
    place: str
    """The directory of checkpoints, or the URL of their store."""


def remember(known: dict[K, V], key: K, value: V, count: int = REMEMBERED) -> None:
    """Note something, and forget what is long ago."""
    known[key] = value
    if len(known) > count:
        del known[next(iter(known))]


def label(name: str) -> str:
    """How a step is called, by the name of its directory."""
    era = era_of(name)
    return f"step {step_of(name)}" + (f" of era {era}" if era else "")


@dataclass(slots=True, eq=False)
class Guest:
    """A process that is connected: a rank, or somebody who restores."""

    link: Link[FromClient]
    rank: int | None = None
    seen: set[int] = field(default_factory=set[int])
    reading: list[int] = field(default_factory=list[int])
    waiting: Lend | None = None
    filling: set[int] = field(default_factory=set[int])
    """Slots that were lent to it, and not given back."""


@dataclass(slots=True)
class Held:
    """The memory behind a slot."""

    fd: int
    draft: int = -1
    draft_digest: str = ""
    arena: Arena | None = None

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        else:
            os.close(self.fd)
        if self.draft >= 0:
            os.close(self.draft)


class Keeper:
    """Owns the slots; everything happens in `run`, except writing, which has threads."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.listener = listen(Path(config.socket))
        self.slots: dict[int, Slot] = {}
        self.memory: dict[int, Held] = {}
        self.guests: dict[int, Guest] = {}
        self._failed: dict[str, Failed] = {}
        self._came: dict[tuple[int, str], None] = {}
        """The last parts that came, by rank and name."""
        self._left: set[int] = set()
        """Ranks that closed their savers."""
        self.place = Place(config.place)
        self.is_over = False
        """It has no directory any more, and nobody finds it."""
        self._next_slot = 1
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.commits = Commits(self.place, self._later, self.say, self._committed)

    def _later(self, call: Callable[[], None]) -> None:
        """Have the loop make a call: how threads report."""
        self._calls.put(call)
        with suppress(OSError):
            self._wake.send(b"!")

    def say(self, text: str) -> None:
        """A line for the user: in the output of rank 0, or in the keeper's own log if there is none."""
        for guest in self._of_rank(0):
            self._send(guest, Said(text))
            return
        os.write(2, f"argosy keeper: {text}\n".encode())

    def run(self) -> None:
        """Serve until the run ends and everything whole is written."""
        pulse, checked_at = Pulse(self.config.life, self.place), 0.0
        ends_at: float | None = None
        while True:
            for key, _ in self._selector.select(TICK_S):
                self._serve(key.fileobj)
            while not self._calls.empty():
                self._calls.get()()
            now = time.monotonic()
            if now - checked_at >= TICK_S:
                checked_at = now
                if self.place.look() == "replaced":
                    self._end()
                if ends_at is None and not pulse.beats(now):
                    ends_at = now + END_S
                self._settle()
            if self.is_over:
                break
            if ends_at is not None and (self.commits.idle or now > ends_at):
                break
        if not self.is_over:
            self.commits.release()
            with suppress(OSError):
                os.unlink(self.config.socket)

    def _end(self) -> None:
        """L2: the directory is another one now. The next rank finds no keeper, and starts another."""
        if not self.is_over:
            self.is_over = True
            with suppress(OSError):
                os.unlink(self.config.socket)
            self.listener.close()

    def _serve(self, source: object) -> None:
        if source is self.listener:
            with suppress(OSError):
                sock = accept(self.listener)
                if sock is not None:
                    guest = Guest(Link(sock, client_decoder, "a rank"))
                    self.guests[guest.link.fileno()] = guest
                    self._selector.register(guest.link, selectors.EVENT_READ)
        elif source is self._woken:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        elif isinstance(source, Link):
            guest = self.guests.get(source.fileno())
            if guest is None or guest.link is not source:
                return  # It left in this very look: somebody's message could not be sent to it.
            try:
                guest.link.flush()
                for message, fds in guest.link.receive():
                    self._answer(guest, message, fds)
                self._watch(guest)
            except (ArgosyError, BadFrame, OSError):
                self._leave(guest)

    def _watch(self, guest: Guest) -> None:
        if guest.link.fileno() in self.guests:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.link.wants_write else 0)
            self._selector.modify(guest.link, events)

    def _send(self, guest: Guest, message: object, fds: tuple[int, ...] = ()) -> None:
        try:
            guest.link.send(message, fds)
            self._watch(guest)
        except ArgosyError:
            self._leave(guest)

    def _leave(self, guest: Guest) -> None:
        """A guest is gone: what it was lent and did not fill is free again, what it read is let go."""
        if self.guests.pop(guest.link.fileno(), None) is None:
            return
        self._selector.unregister(guest.link)
        guest.link.close()
        for number in guest.reading:
            if number in self.slots:
                self.slots[number].readers -= 1
        for number in guest.filling:
            self.slots[number].phase = "free"
        if guest.rank is not None and not self._of_rank(guest.rank):
            self._give_up_without(guest.rank)
        self._settle()

    def _give_up_without(self, rank: int) -> None:
        """A rank is gone: steps that lack its part will not be."""
        whole = {name for _, name in versions(self.slots.values())}
        held = [slot for slot in self.slots.values() if slot.phase == "held" and slot.name not in whole]
        having = {slot.name for slot in held if slot.rank == rank}
        for name in sorted({slot.name for slot in held} - having):
            self._give_up(name, f"rank {rank} is gone")

    def _give_up(self, name: str, reason: str) -> None:
        """A step will never be whole: what is held of it is of no use."""
        for slot in self.slots.values():
            if slot.phase == "held" and slot.name == name and not slot.users:
                slot.phase = "free"
        self._fail(name, reason)

    def _of_rank(self, rank: int | None) -> list[Guest]:
        return [guest for guest in self.guests.values() if guest.rank == rank]

    def _answer(self, guest: Guest, message: FromClient, fds: list[int]) -> None:
        match message:
            case Hello():
                self._greet(guest, message)
            case Lend():
                guest.waiting = message
                self._settle()
            case Filled():
                self._take(guest, message, fds)
            case Torn(slot, name, reason):
                self._free(guest, slot)
                self._give_up(name, reason)
                self._agree(guest, name)
                self._settle()
            case Look():
                self._send(guest, Holdings(self._holdings()))
            case Take(name):
                self._hand_out(guest, name)
            case Bye():
                if guest.rank is not None and self._of_rank(guest.rank) == [guest]:  # It may have another saver by now.
                    self._left.add(guest.rank)
                    self.commits.leave(guest.rank)
                self._leave(guest)

    def _free(self, guest: Guest, number: int) -> None:
        """A guest gives back what it was lent."""
        if number in guest.filling:
            guest.filling.remove(number)
            self.slots[number].phase = "free"

    def _agree(self, guest: Guest, name: str) -> bool:
        """Whether no other rank saves another step as the save of this number; if one does, neither will be."""
        rank = guest.rank or 0
        other = mismatch(name, rank, self._came)
        remember(self._came, (rank, name), None, REMEMBERED * max(1, self.commits.size))
        if other is None:
            return True
        reason = (
            f"rank {rank} saves {label(name)} where rank {other[0]} saves {label(other[1])}: "
            "all ranks save the same steps in the same order"
        )
        self._give_up(other[1], reason)
        self._give_up(name, reason)
        return False

    def _greet(self, guest: Guest, hello: Hello) -> None:
        if self.place.look() != "there":
            self._end()
            return
        try:
            self.commits.join(hello)
        except DirectoryInUse as error:
            self._send(guest, Refused(str(error), error.hint, in_use=True))
            return
        except (ArgosyError, OSError) as error:
            self._send(guest, Refused(str(error)))
            return
        guest.rank = hello.rank
        self._left.discard(hello.rank)
        # A new rank begins behind a restore: parts of steps that never became whole are of no use.
        whole = {name for _, name in versions(self.slots.values())}
        for slot in self.slots.values():
            if slot.rank == hello.rank and slot.phase == "held" and slot.name not in whole and not slot.users:
                slot.phase = "free"
        self._send(guest, Welcome())

    def _settle(self) -> None:
        """Free snapshots that nobody needs, then serve ranks that wait for memory."""
        if self.is_over:
            return
        for slot in surplus(list(self.slots.values())):
            slot.phase = "free"
            if not slot.durable and slot.name not in self._failed:
                self._fail(slot.name, "not all ranks saved it, and a later step is whole")
        for guest in list(self.guests.values()):
            if guest.waiting is not None and guest.rank is not None:
                self._lend(guest, guest.rank, room_of(guest.waiting.bytes))

    def _lend(self, guest: Guest, rank: int, size: int) -> None:
        if self.place.look() != "there":
            self._end()
            return
        slot = self._slot(rank, size)
        if isinstance(slot, Later):
            return
        if isinstance(slot, Never):  # All ranks write the step themselves: without a keeper they all know.
            self.say(f"the keeper has no memory for snapshots and ends: {slot.reason}")
            self.commits.release()
            self._end()
            return
        guest.waiting = None
        guest.filling.add(slot.id)
        fds = () if slot.id in guest.seen else (self.memory[slot.id].fd,)
        guest.seen.add(slot.id)
        self._send(guest, Lent(slot.id), fds)

    def _slot(self, rank: int, size: int) -> Slot | Later | Never:
        """A lent slot of at least `size` bytes."""
        chosen = choose_slot(list(self.slots.values()), rank, size, self.config.bytes_max)
        if isinstance(chosen, Make):
            for number in chosen.close:
                self._forget(number)
            try:
                fd = new_memory(size)
            except OSError as error:
                return Never(f"no memory: {error.strerror}")
            slot = Slot(self._next_slot, rank, size)
            self._next_slot += 1
            self.slots[slot.id], self.memory[slot.id] = slot, Held(fd)
        elif isinstance(chosen, Reuse):
            slot = self.slots[chosen.slot]
        else:
            return chosen
        if slot.phase == "held" and not slot.durable:
            self._fail(slot.name, "its memory is needed for a newer one", overtaken=True)
        slot.phase, slot.name, slot.durable, slot.order = "lent", "", False, 0
        return slot

    def _arena(self, number: int) -> Arena:
        """The memory of a slot, mapped when it is first looked into."""
        held = self.memory[number]
        if held.arena is None:
            held.arena = Arena(self.slots[number].bytes - BLOCK, held.fd)
        return held.arena

    def _forget(self, number: int) -> None:
        slot = self.slots.pop(number)
        if slot.phase == "held" and not slot.durable:
            self._fail(slot.name, "its memory is needed for a newer one", overtaken=True)
        self.memory.pop(number).close()

    def _take(self, guest: Guest, filled: Filled, fds: list[int]) -> None:
        """A rank filled a slot: it is held, and when all ranks did, written."""
        held = self.memory[filled.slot] if filled.slot in guest.filling else None
        sequence = self._arena(filled.slot).sequence if held is not None else -1
        if held is None or len(fds) != 1 or sequence != filled.sequence or sequence % 2:
            for fd in fds:
                os.close(fd)
            self._fail(filled.name, "its memory does not hold what was announced")
            return
        slot = self.slots[filled.slot]
        if not self._agree(guest, filled.name) or filled.name in self._failed:
            os.close(fds[0])
            self._free(guest, slot.id)
            self._tell_ranks(self._failed[filled.name])
            self._settle()
            return
        guest.filling.discard(slot.id)
        if held.draft >= 0:
            os.close(held.draft)
        held.draft, held.draft_digest = fds[0], filled.draft_digest
        size = self.commits.size
        slot.phase, slot.name, slot.step, slot.size = "held", filled.name, filled.step, size
        slot.order = self._order(filled.name)
        parts = [each for each in self.slots.values() if each.phase == "held" and each.name == filled.name]
        gone = (
            (self.commits.ranks | self._left)
            - {guest.rank for guest in self.guests.values()}
            - {each.rank for each in parts}
        )
        if len(parts) == size:
            self._whole(filled, parts)
        elif gone:
            self._give_up(filled.name, f"rank {min(gone)} is gone")
        self._settle()

    def _order(self, name: str) -> int:
        """When the first part of a version came, among the versions held."""
        orders = {each.name: each.order for each in self.slots.values() if each.phase == "held" and each.order}
        return orders.get(name) or max((each.order for each in self.slots.values()), default=0) + 1

    def _whole(self, filled: Filled, parts: list[Slot]) -> None:
        pieces = [(slot, self.memory[slot.id]) for slot in sorted(parts, key=lambda slot: slot.rank)]
        drafts = [(slot, held.arena, held.draft) for slot, held in pieces if held.arena is not None]
        for name in self.commits.submit(filled.name, drafts, is_tagged=filled.is_tagged):
            self._fail(name, "the store is slow, a newer step is written instead", overtaken=True)

    def _committed(self, name: str, error: BaseException | None) -> None:
        for slot in self.slots.values():
            if slot.name == name:
                slot.durable = True  # Or it cannot be: either way it no longer waits to be written.
        if error is None:
            self._tell_ranks(Durable(name))
        else:
            self._fail(name, str(error))
        self._settle()

    def _fail(self, name: str, reason: str, *, overtaken: bool = False) -> None:
        remember(self._failed, name, Failed(name, reason, overtaken))
        self._tell_ranks(self._failed[name])

    def _tell_ranks(self, message: object) -> None:
        for guest in list(self.guests.values()):
            if guest.rank is not None:
                self._send(guest, message)

    def _holdings(self) -> list[Version]:
        if self.place.look() != "there":
            return []  # They are another directory's (L2).
        sizes = {slot.name: slot.size for slot in self.slots.values()}
        return [Version(name, step, sizes[name]) for step, name in versions(self.slots.values())]

    def _hand_out(self, guest: Guest, name: str) -> None:
        for slot in sorted(self.slots.values(), key=lambda slot: slot.rank):
            held = self.memory[slot.id]
            if slot.phase == "held" and slot.name == name and self.place.look() == "there":
                slot.readers += 1
                guest.reading.append(slot.id)
                self._send(guest, Kept(name, slot.rank, held.draft_digest), (held.fd, held.draft))
        self._send(guest, Holdings(self._holdings()))
