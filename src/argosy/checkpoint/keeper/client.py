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
from threading import Condition, Thread, current_thread
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import psutil

from argosy.checkpoint.arena import Arena, memory_of
from argosy.checkpoint.committing import Committer
from argosy.checkpoint.format import ROOT, Draft, digest, unseal
from argosy.checkpoint.keeper.life import Life, default_life, peer_path, socket_path
from argosy.checkpoint.keeper.memory import Memory, close_all
from argosy.checkpoint.keeper.messages import (
    Apart,
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
    Returned,
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
        size: Any = self.bytes_max
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ConfigError(f"bytes_max must be a whole number from 1 on: {size!r}", hint="64 << 30 is 64 GiB")


def default_keeping() -> Keeping | None:
    """A keeper under `argosy run`; without it none, as nobody would end it."""
    return Keeping() if here().launcher == "argosy" else None


class _Submitted(NamedTuple):
    """Whoever holds one uses its arena."""

    draft: Draft
    arena: Arena
    done: Done
    is_given_up: bool = False
    """A rank was replaced: without the keeper it cannot become whole."""

    @property
    def turn(self) -> str:
        """All ranks write what they have to in this order."""
        return self.draft.name.rpartition("-")[2]


class KeptWriter:
    """Borrows arenas from the keeper, and has it commit what lies in them."""

    def __init__(self, committer: Committer, keeping: Keeping, path: str) -> None:
        self.committer, self._keeping = committer, keeping
        committer.store.say = committer.say
        life = keeping.life or default_life()
        self._path, self._life, self._place = socket_path(path, life), life, os.path.abspath(path)
        if is_url(path):
            self._place = path
        self._changed = Condition()
        self._answers: list[tuple[FromKeeper, list[int]]] = []
        self._submitted: dict[str, _Submitted] = {}
        """What the keeper has, and has not committed."""
        self._here: list[_Submitted] = []
        """What this rank commits itself."""
        self._memory = Memory()
        self._link: Link[FromKeeper] | None = None
        self._is_lending = self._is_closing = self._has_left = False
        self._tried_at = -AGAIN_S
        self._fault = self._refusal = ""
        self._seeker = Thread(target=self._rejoin)  # Each is started when it is needed.
        self._join()

    def _join(self, *, is_again: bool = False) -> None:
        """Connect, to a new keeper if need be; `is_again`: to one that was lost, and may answer later.

        Raises:
            DirectoryInUse: another run writes to the directory.
            PeerLost: there is no keeper to be had.
        """
        self._tried_at = time.monotonic()
        ensure(self._config(), self.committer.say)
        try:
            self._greet(is_again)
        except PeerLost:  # It has ended meanwhile, or did not answer and was ended: it is this run's own.
            if is_again:
                raise
            ensure(self._config(), self.committer.say)
            self._greet(is_again)

    def _greet(self, is_again: bool) -> None:
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
        with self._changed, contextlib.suppress(PeerLost):
            self._link = link
            self._listener = Thread(target=self._listen, args=(link,), name="argosy-kept", daemon=True)
            self._listener.start()
            for each in self._here:
                link.send(Apart(each.draft.name))

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
        while not (self._has_left and time.monotonic() - heard_at > CLOSE_S):
            now = time.monotonic()
            if not (self._is_lending or self._submitted or self._has_left):
                heard_at, has_asked = now, False  # Nobody waits for a word of it.
            if now - heard_at > SILENT_S and not self._has_left:
                why = f"the keeper does not answer for {SILENT_S:g} s"
                self.committer.say(f"{why}, is it stopped? Until it does, snapshots stay in the memory of the ranks")
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
            for _, fds in self._answers:
                close_all(fds)
            left, self._answers, self._submitted = list(self._submitted.values()), [], {}
            self._here += left
            self._changed.notify_all()
        self._memory.retire()
        for submitted in left:
            self._commit_here(submitted, why)

    def _hear(self, message: FromKeeper, fds: list[int]) -> None:
        match message:
            case Lent() | Refused():
                with self._changed:
                    self._answers.append((message, fds))
                    self._changed.notify_all()
            case Apart(name):
                self._part(name)
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
            self._release(submitted.arena)
            submitted.done(error)

    def _part(self, name: str) -> None:
        """Another rank writes its part of a step itself: so does this one, beside what it hears."""
        with self._changed:
            submitted = self._submitted.pop(name, None)
            if submitted is not None:
                self._here.append(submitted)
        if submitted is not None:
            Thread(target=self._commit_apart, args=(submitted, self._link), name="argosy-apart", daemon=True).start()

    def _commit_apart(self, submitted: _Submitted, link: Link[FromKeeper] | None) -> None:
        self._commit_here(submitted)
        with self._changed, contextlib.suppress(PeerLost):
            if link is not None and self._link is link:
                link.send(Returned(submitted.arena.slot))

    def _commit_here(self, submitted: _Submitted, why: str = "") -> None:
        """Without the keeper: commit what is in `_here`, when its turn comes."""
        error: BaseException | None = None
        try:
            with self._changed:  # Each turn ends, as a commit waits for other ranks up to a deadline.
                self._changed.wait_for(lambda: min(each.turn for each in self._here) == submitted.turn)
            self._commit_now(submitted, why)
        except BaseException as caught:
            error = caught
        with self._changed:
            self._here = [each for each in self._here if each is not submitted]
            self._changed.notify_all()
        self._release(submitted.arena)
        submitted.done(error)
        if error is None:
            self.committer.tidy()

    def _commit_now(self, submitted: _Submitted, why: str) -> None:
        """Commit from this process, under a name that the keeper did not use."""
        draft = submitted.draft
        if self._is_committed(draft):
            return
        if submitted.is_given_up:
            raise PeerLost("a rank", "it was replaced meanwhile")
        if why:
            self.committer.say(f"step {draft.step} is written by its ranks: {why}")
        name = f"{draft.name}0f"
        entries = [msgspec.structs.replace(e, file=e.file.replace(draft.name, name)) for e in draft.entries]
        self.committer.commit(msgspec.structs.replace(draft, name=name, entries=entries), submitted.arena.view)

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
            return self._memory.own(size, LEND_TIMEOUT_S)
        message, fds = self._ask(link, size)
        if isinstance(message, Lent):
            arena = self._memory.known(message.slot) if not fds else Arena(size, fds[0], message.slot)
            with self._changed:
                if self._link is link and arena is not None:
                    return self._memory.lent(arena)
            if fds and arena is not None:
                arena.close()
        elif isinstance(message, Refused) and message.reason != self._refusal:  # Once, not with every save.
            self._refusal = message.reason
            self.committer.say(
                f"the keeper has no memory for snapshots: they stay in the memory of the rank: {message.reason}"
            )
        return self._memory.own(size, LEND_TIMEOUT_S)

    def _ask(self, link: Link[FromKeeper], size: int) -> tuple[FromKeeper | None, list[int]]:
        """Ask the keeper for memory; None if it is lost.

        Raises:
            DeadlinePassed: it lives, and has none for too long.
        """
        try:
            with self._changed:
                self._is_lending = True
                link.send(Lend(size))
                answered = self._changed.wait_for(lambda: self._answers or self._link is not link, LEND_TIMEOUT_S)
                if not answered:
                    raise DeadlinePassed("memory of an earlier save free again", LEND_TIMEOUT_S)
                return self._answers.pop(0) if self._answers else (None, [])
        except PeerLost:
            return None, []
        finally:
            self._is_lending = False

    def _seek(self) -> None:
        """Look for a keeper in the background, now and then."""
        is_time = time.monotonic() - self._tried_at > AGAIN_S
        if is_time and not self._memory.is_borrowed and not self._seeker.is_alive():  # K2
            self._tried_at = time.monotonic()
            self._seeker = Thread(target=self._rejoin, name="argosy-seek", daemon=True)
            self._seeker.start()

    def _rejoin(self) -> None:
        self._listener.join()  # K2
        try:
            self._join(is_again=True)
            self._fault = ""
            if self._has_left:
                self._leave()
        except ArgosyError as error:
            if str(error) != self._fault:
                self._fault = str(error)
                self.committer.say(f"no keeper: snapshots stay in the memory of the ranks: {error}")

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
        filled = Filled(arena.slot, arena.sequence, draft.name, draft.step, bool(draft.tags), digest(data))
        fd = memory_of(data)
        # If the keeper is lost, the listening thread finds the same, and commits it here.
        is_kept = False
        with self._changed, contextlib.suppress(PeerLost):
            is_kept = self._link is not None and self._memory.is_lent(arena)
            self._memory.hold(arena)
            if is_kept:
                self._submitted[draft.name] = submitted
            else:
                self._here.append(submitted)
            if self._link is not None:
                self._link.send(filled if is_kept else Apart(draft.name), [fd] if is_kept else [])
        os.close(fd)
        if not is_kept:
            self._commit_here(submitted)  # That there is no keeper, or no memory in it, was said.
        self._release(arena)

    def _release(self, arena: Arena) -> None:
        """One use of an arena is over; with the last one a closed writer leaves."""
        self._memory.release(arena)
        if self._is_closing and not self._memory.is_used:
            self._leave()

    def abandon(self, name: str, arena: Arena | None, reason: str) -> None:
        """Give an arena back without a snapshot, and tell the other ranks that step `name` will not be."""
        link: Link[FromKeeper] | None = None
        with self._changed, contextlib.suppress(PeerLost):
            link = self._link if arena is None or self._memory.is_lent(arena) else None
            if link is not None:
                link.send(Torn(arena.slot if arena is not None else 0, name, reason))
        if link is None:
            self.committer.give_up(name, reason)
        if arena is not None:
            self._release(arena)

    def let_go(self) -> None:
        """Wait no more for other ranks' parts: the keeper tells what becomes of them, while it lives."""
        with self._changed:
            self._submitted = {name: each._replace(is_given_up=True) for name, each in self._submitted.items()}
        self.committer.let_go()

    def close(self) -> None:
        """Leave the keeper; what is still copied or written goes on, and the last of it leaves (B1)."""
        if self._seeker.is_alive():
            self._seeker.join(CLOSE_S)
        self._is_closing = True
        if not self._memory.is_used:
            self._leave()

    def _leave(self) -> None:
        with self._changed, contextlib.suppress(PeerLost):
            self._has_left = True
            if self._link is not None:
                self._link.send(Bye())
        if self._listener is not current_thread():
            self._listener.join(CLOSE_S)
        self._memory.close()
