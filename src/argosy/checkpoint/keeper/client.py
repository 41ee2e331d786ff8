"""A rank's side of the keeper: start one if there is none, borrow its memory, hand snapshots over, hear of them.

K1  A keeper that dies costs no save: what it had not committed the ranks commit themselves, from the same memory.
K2  One that does not answer counts as dead until it does, so a save waits a few seconds for it, once. It is joined
    again only when nothing is written from memory that it may lend again.
K3  New ranks cannot do without it, as it holds the directory: one that does not answer them is killed and replaced.
"""

import contextlib
import os
import select
import time
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import psutil

from argosy.checkpoint.arena import Arena, memory_of
from argosy.checkpoint.committing import Committer
from argosy.checkpoint.format import ROOT, Draft, digest, unseal
from argosy.checkpoint.keeper.life import Life, default_life, peer_path, socket_path
from argosy.checkpoint.keeper.messages import (
    Bye,
    Durable,
    Failed,
    Filled,
    FromKeeper,
    Hello,
    Lend,
    Lent,
    Look,
    Overtaken,
    Refused,
    Said,
    Torn,
    Welcome,
    keeper_decoder,
)
from argosy.checkpoint.keeper.starting import START_S, ensure
from argosy.checkpoint.owner import DirectoryInUse
from argosy.checkpoint.stores import is_url
from argosy.checkpoint.writing import LEND_TIMEOUT_S, Done, Snapshotting
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.fabric import Link, connect, here

if TYPE_CHECKING:
    from argosy.checkpoint.keeper.service import Config

CLOSE_S = 5.0
AGAIN_S = 5.0
"""After a keeper could not be had, the next try."""
HELLO_S = 5.0
ASK_S = 1.0
"""Who waits for a keeper that has said nothing for so long asks it for a word."""
SILENT_S = 3.0
"""Without a word for so long, it counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Keep snapshots in a process of their own, which outlives the ranks."""

    bytes_max: int | None = None
    """Of its memory; half of what is available when it starts if not given."""
    peer: bool = False
    """Ship every snapshot to a second keeper as well."""
    life: Life | None = None
    """How long it lives: as the run under `argosy run`, else as the process that started this one."""

    def __post_init__(self) -> None:
        if self.bytes_max is not None and self.bytes_max < 1:
            raise ConfigError(f"bytes_max must be at least 1: {self.bytes_max}")


def default_keeping() -> Keeping | None:
    """A keeper under `argosy run`; without it none, as nobody would end it."""
    return Keeping() if here().launcher == "argosy" else None


class _Submitted(NamedTuple):
    draft: Draft
    arena: Arena
    done: Done


class KeptWriter:
    """Borrows arenas from the keeper, and has it commit what lies in them."""

    def __init__(self, committer: Committer, keeping: Keeping, path: str) -> None:
        self.committer, self._keeping = committer, keeping
        life = keeping.life or default_life()
        self._path, self._life, self._place = socket_path(path, life), life, os.path.abspath(path)
        if is_url(path):
            self._place = path
        self._changed = Condition()
        self._answers: list[tuple[FromKeeper, list[int]]] = []
        self._submitted: dict[str, _Submitted] = {}
        self._arenas: dict[int, Arena] = {}
        self._own: list[Arena] = []
        self._lent: set[int] = set()
        """Slots of the keeper that this rank fills, or writes from itself."""
        self._link: Link[FromKeeper] | None = None
        self._is_lending = False
        self._tried_at = -AGAIN_S
        self._fault = ""
        self._alone = Lock()
        self._seeker = Thread(target=self._rejoin)  # Each is started when it is needed.
        try:
            self._join()
        except PeerLost:  # It has ended meanwhile, or did not answer and was ended: it is this run's own.
            self._join()

    def _join(self, *, is_again: bool = False) -> None:
        """Connect, to a new keeper if need be; `is_again`: to one that was lost, and may answer later.

        Raises:
            DirectoryInUse: another run writes to the directory.
            PeerLost: there is no keeper to be had.
        """
        self._tried_at = time.monotonic()
        ensure(self._config())
        link = connect(self._path, keeper_decoder, "the keeper")
        link.send(Hello(self.committer.rank, self.committer.size, self._place, list(self.committer.keep)))
        try:
            answer = self._answer(link, is_again)
        except BaseException:
            link.close()
            raise
        if isinstance(answer, Refused):
            link.close()
            raise (DirectoryInUse if answer.in_use else ConfigError)(answer.reason, hint=answer.hint)
        assert isinstance(answer, Welcome)
        with self._changed:
            self._arenas, self._answers, self._link = {}, [], link
        self._listener = Thread(target=self._listen, args=(link,), name="argosy-kept", daemon=True)
        self._listener.start()

    def _config(self) -> "Config":
        from argosy.checkpoint.keeper.service import Config

        bytes_max = self._keeping.bytes_max or psutil.virtual_memory().available // 2
        peer = str(peer_path(self._path)) if self._keeping.peer else ""
        store = self.committer.store.name
        place = store if is_url(store) else os.path.abspath(store)
        if not is_url(store):
            os.makedirs(place, exist_ok=True)  # A keeper ends when it is gone.
        return Config(str(self._path), bytes_max, self._life, place, peer)

    def _answer(self, link: Link[FromKeeper], is_again: bool) -> FromKeeper:
        """What the keeper says to a hello. New ranks end one that says nothing (K3)."""
        try:
            keeper = psutil.Process(link.peer_pid)
        except psutil.NoSuchProcess:
            raise PeerLost("the keeper", "it ended") from None
        try:
            return link.wait(START_S if is_url(self._place) else HELLO_S)[0]
        except DeadlinePassed:
            lost = PeerLost("the keeper", f"it does not answer, is it stopped? ({self._path})")
        if is_again:
            raise lost
        with contextlib.suppress(psutil.NoSuchProcess):
            if keeper.status() != psutil.STATUS_STOPPED:
                with contextlib.suppress(DeadlinePassed):  # It may only be slow.
                    return link.wait(START_S)[0]
            self.committer.say(f"the keeper (pid {keeper.pid}) does not answer and is replaced")
            keeper.kill()
            with contextlib.suppress(DeadlinePassed):  # Its end is seen at the link.
                link.wait(CLOSE_S)
        raise lost

    def _listen(self, link: Link[FromKeeper]) -> None:
        """A thread per link: hear the keeper until it is gone; then see to what it left undone."""
        poller = select.poll()
        poller.register(link, select.POLLIN)
        heard_at, has_asked, why = time.monotonic(), False, "the keeper is lost"
        while True:
            now = time.monotonic()
            if not (self._is_lending or self._submitted):
                heard_at, has_asked = now, False  # Nobody waits for a word of it.
            if now - heard_at > SILENT_S:
                why = f"the keeper does not answer for {SILENT_S:g} s"
                self.committer.say(f"{why}, is it stopped? Until it does snapshots stay in the ranks")
                break
            try:
                if now - heard_at > ASK_S and not has_asked:
                    has_asked = True
                    with self._changed:
                        link.send(Look())
                poller.poll(ASK_S / 4 * 1000)
                for message, fds in link.receive():
                    heard_at, has_asked = time.monotonic(), False
                    self._hear(message, fds)
            except (ArgosyError, OSError):
                break
        with self._changed:  # Nobody sends meanwhile.
            link.close()
            if self._link is link:
                self._link = None
            left, self._submitted = self._submitted, {}
            self._changed.notify_all()
        for submitted in left.values():
            self._commit_here(submitted, why)

    def _hear(self, message: FromKeeper, fds: list[int]) -> None:
        match message:
            case Lent() | Refused():
                with self._changed:
                    self._answers.append((message, fds))
                    self._changed.notify_all()
            case Durable(name):
                self._done(name, None)
            case Failed(name, reason, overtaken):
                kind = Overtaken if overtaken else ArgosyError
                self._done(name, kind(reason))
            case Said(text):
                self.committer.say(text)
            case _:
                pass

    def _done(self, name: str, error: BaseException | None) -> None:
        with self._changed:
            submitted = self._submitted.pop(name, None)
        if submitted is not None:
            submitted.done(error)

    def _commit_here(self, submitted: _Submitted, why: str = "") -> None:
        """Without the keeper: commit from this process, under a name that the keeper did not use."""
        draft = submitted.draft
        if self._is_committed(draft):
            submitted.done(None)
            return
        if why:
            self.committer.say(f"step {draft.step} is written by its ranks: {why}")
        name = f"{draft.name}0f"
        entries = [msgspec.structs.replace(e, file=e.file.replace(draft.name, name)) for e in draft.entries]
        try:
            again = msgspec.structs.replace(draft, name=name, entries=entries)
            with self._alone:
                self.committer.commit(again, submitted.arena.view)
        except BaseException as error:
            submitted.done(error)
        else:
            submitted.done(None)
            self.committer.tidy()

    def _is_committed(self, draft: Draft) -> bool:
        try:
            path = f"{draft.name}/{ROOT}"
            unseal(self.committer.store.files.read(path), path)
        except (OSError, ArgosyError):
            return False
        return True

    def lend(self, size: int) -> Arena:
        link = self._link
        if link is None:
            self._seek()
            return self._own_arena(size)
        try:
            with self._changed:
                self._is_lending = True
                link.send(Lend(size))
                answered = self._changed.wait_for(lambda: self._answers or self._link is not link, LEND_TIMEOUT_S)
                if not answered:
                    raise DeadlinePassed("memory of an earlier save free again", LEND_TIMEOUT_S)
                if not self._answers:
                    return self._own_arena(size)
                message, fds = self._answers.pop(0)
        except PeerLost:
            return self._own_arena(size)
        finally:
            self._is_lending = False
        if isinstance(message, Refused):
            self.committer.say(f"the keeper has no memory for this snapshot, it stays in the rank: {message.reason}")
            return self._own_arena(size)
        assert isinstance(message, Lent)
        if fds:
            self._arenas[message.slot] = Arena(size, fds[0], message.slot)
        self._lent.add(message.slot)
        return self._arenas[message.slot]

    def _seek(self) -> None:
        """Look for a keeper in the background, now and then."""
        is_time = time.monotonic() - self._tried_at > AGAIN_S
        if is_time and not self._lent and not self._seeker.is_alive():  # K2
            self._tried_at = time.monotonic()
            self._seeker = Thread(target=self._rejoin, name="argosy-seek", daemon=True)
            self._seeker.start()

    def _rejoin(self) -> None:
        self._listener.join()  # K2
        try:
            self._join(is_again=True)
            self._fault = ""
        except ArgosyError as error:
            if str(error) != self._fault:
                self._fault = str(error)
                self.committer.say(f"no keeper, snapshots stay in the ranks: {error}")

    def _own_arena(self, size: int) -> Arena:
        """Memory of this rank's own, where the keeper has none."""
        fitting = [arena for arena in self._own if arena.size >= size]
        if fitting:
            self._own.remove(fitting[0])
            return fitting[0]
        return Arena(size)

    def submit(self, draft: Draft, filling: Snapshotting, done: Done) -> None:
        arena = filling.arena
        try:
            draft = msgspec.structs.replace(draft, entries=filling.entries())
            data = msgspec.json.encode(draft)
        except Exception as error:
            self.abandon(draft.name, arena, str(error))
            done(error)
            return
        arena.finish()
        submitted = _Submitted(draft, arena, done)
        with self._changed:
            link = self._link_of(arena)
            if link is not None:
                self._submitted[draft.name] = submitted
        if link is None:
            self._commit_here(submitted)  # That there is no keeper, or no memory in it, was said.
            self._take_back(arena)
            return
        filled = Filled(arena.slot, arena.sequence, draft.name, draft.step, bool(draft.tags), digest(data))
        fd = memory_of(data)
        # If it is lost, the listening thread finds the same, and commits it here.
        with self._changed, contextlib.suppress(PeerLost):
            link.send(filled, [fd])
        os.close(fd)
        self._take_back(arena)

    def _link_of(self, arena: Arena) -> Link[FromKeeper] | None:
        """The keeper that lent an arena, if it still is the keeper."""
        return self._link if self._arenas.get(arena.slot) is arena else None

    def _take_back(self, arena: Arena) -> None:
        """This rank is through with an arena."""
        self._lent.discard(arena.slot)
        if not arena.slot:
            self._own.append(arena)

    def abandon(self, name: str, arena: Arena | None, reason: str) -> None:
        """Give an arena back without a snapshot, and tell the other ranks that step `name` will not be."""
        link = self._link if arena is None else self._link_of(arena)
        if arena is not None:
            self._take_back(arena)
        if link is None:
            self.committer.give_up(name, reason)
            return
        with self._changed, contextlib.suppress(PeerLost):
            link.send(Torn(arena.slot if arena is not None else 0, name, reason))

    def let_go(self) -> None:
        with self._changed:
            self._submitted = {}
        self.committer.let_go()

    def close(self) -> None:
        if self._seeker.is_alive():
            self._seeker.join(CLOSE_S)
        link, arenas = self._link, [*self._arenas.values(), *self._own]
        if link is not None:
            with self._changed, contextlib.suppress(PeerLost):
                link.send(Bye())
        self._listener.join(CLOSE_S)
        self._arenas, self._own = {}, []
        for arena in arenas:
            arena.close()
