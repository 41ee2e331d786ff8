"""A rank's side of the keeper: start one if there is none, borrow its memory, hand snapshots over, hear of them.

K1  A keeper that dies costs no save: what it had not committed the ranks commit themselves, from the same memory. They
    save without one until the next launch.
K2  One that does not answer is killed, so that all ranks lose it at once.
"""

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from threading import Condition, Thread, current_thread
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import psutil

from argosy.checkpoint.arena import Arena, memory_of
from argosy.checkpoint.commit_step import Committer
from argosy.checkpoint.format import ROOT, Draft, digest, unseal
from argosy.checkpoint.keeper.life import Life, default_life, socket_path
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
    keeper_decoder,
)
from argosy.checkpoint.keeper.start_keeper import START_S, ensure
from argosy.checkpoint.own_writer import LEND_TIMEOUT_S, Done, OwnWriter, Snapshotting
from argosy.checkpoint.owner import DirectoryInUse, take
from argosy.checkpoint.stores import is_url
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.fabric import Link, connect, here

if TYPE_CHECKING:
    from argosy.checkpoint.keeper.service import Config

CLOSE_S = 5.0
ASK_S = 1.0
"""After so long without a message from a keeper, a waiting rank asks it for one."""
SILENT_S = 10.0
"""A keeper that is silent for so long is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Keep snapshots in a process of their own, which outlives the ranks."""

    bytes_max: int | None = None
    """Of its memory; half of what is available when it starts if not given."""
    life: Life | None = None
    """The run that it lives as long as; that of `argosy run` if not given."""

    def __post_init__(self) -> None:
        size: Any = self.bytes_max
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ConfigError(f"bytes_max must be a whole number from 1 on: {size!r}", hint="64 << 30 is 64 GiB")


def default_keeping() -> Keeping | None:
    """A keeper under `argosy run` on one host. Without it nobody would end one; on several hosts none has all ranks."""
    return Keeping() if here().launcher == "argosy" and not here().host else None


class _Submitted(NamedTuple):
    """A snapshot that the keeper has, and has not committed."""

    draft: Draft
    arena: Arena
    done: Done
    is_given_up: bool = False
    """A rank was replaced: without the keeper it cannot become whole."""


class KeptWriter:
    """Borrows arenas from the keeper, and has it commit what lies in them."""

    def __init__(self, committer: Committer, keeping: Keeping, path: str, *, may_start: bool = True) -> None:
        life = keeping.life or default_life()
        if life is None:
            raise ConfigError("a keeper ends with its run, and there is none", hint="start the script by `argosy run`")
        self.committer, self._own = committer, OwnWriter(committer)
        self._path, self._place = socket_path(path, life), path if is_url(path) else os.path.abspath(path)
        self._changed = Condition()
        self._answers: list[tuple[Lent, list[int]]] = []
        self._submitted: dict[str, _Submitted] = {}
        self._lent: dict[int, Arena] = {}
        """Memory of the keeper's, by its slots."""
        self._used: set[Arena] = set()
        """Those of them that are being filled, or written: native code has their address."""
        self._is_lending = self._is_closing = self._has_left = False
        self._link: Link[FromKeeper] | None = self._joined(self._config(keeping, life), may_start)
        self._listener = Thread(target=self._listen, args=(self._link,), name="argosy-kept", daemon=True)
        self._listener.start()

    @property
    def is_kept(self) -> bool:
        """Whether there is a keeper still."""
        return self._link is not None

    def _config(self, keeping: Keeping, life: Life) -> "Config":
        from argosy.checkpoint.keeper.service import Config

        bytes_max = keeping.bytes_max or psutil.virtual_memory().available // 2
        store = self.committer.store.name
        if not is_url(store):
            store = os.path.abspath(store)
            os.makedirs(store, exist_ok=True)  # A keeper ends when it is gone.
        return Config(str(self._path), bytes_max, life, store)

    def _joined(self, config: "Config", may_start: bool) -> Link[FromKeeper]:
        """A link to the keeper, a new one if need be.

        Raises:
            DirectoryInUse: another run writes to the directory.
            PeerLost: there is no keeper to be had.
        """
        if not may_start:
            return self._greeted()
        ensure(config)
        try:
            return self._greeted()
        except PeerLost:  # It has ended meanwhile, or did not answer and was killed.
            ensure(config)
            return self._greeted()

    def _greeted(self) -> Link[FromKeeper]:
        link = connect(self._path, keeper_decoder, "the keeper")
        try:
            link.send(Hello(self.committer.rank, self.committer.size, self._place, list(self.committer.keep)))
            answer = link.wait(START_S if is_url(self._place) else SILENT_S)[0]
        except DeadlinePassed:
            self._kill(link)
            link.close()
            raise PeerLost("the keeper", f"it does not answer ({self._path})") from None
        except BaseException:
            link.close()
            raise
        if isinstance(answer, Refused):
            link.close()
            raise (DirectoryInUse if answer.in_use else ConfigError)(answer.reason, hint=answer.hint)
        return link

    def _kill(self, link: Link[FromKeeper]) -> None:
        """K2; its end is seen at the link."""
        self.committer.say(f"the keeper (pid {link.peer_pid}) does not answer for {SILENT_S:g} s and is killed")
        with contextlib.suppress(ProcessLookupError):
            os.kill(link.peer_pid, signal.SIGKILL)
        with contextlib.suppress(ArgosyError, OSError):
            link.wait(CLOSE_S)

    def _listen(self, link: Link[FromKeeper]) -> None:
        """Receive messages until the keeper is gone; then commit what it left undone."""
        poller = select.poll()
        poller.register(link, select.POLLIN)
        heard_at, has_asked = time.monotonic(), False
        while not (self._has_left and time.monotonic() - heard_at > CLOSE_S):
            now = time.monotonic()
            if not (self._is_lending or self._submitted or self._has_left):
                heard_at, has_asked = now, False  # Nobody waits for a word of it.
            try:
                if now - heard_at > SILENT_S:
                    self._kill(link)
                    break
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
        self._lost(link)

    def _lost(self, link: Link[FromKeeper]) -> None:
        with self._changed:  # Nobody sends meanwhile.
            link.close()
            self._link = None
            for fd in (fd for _, fds in self._answers for fd in fds):
                os.close(fd)
            left, self._answers, self._submitted = list(self._submitted.values()), [], {}
            for arena in [each for each in self._lent.values() if each not in self._used]:
                del self._lent[arena.slot]
                arena.close()
            self._changed.notify_all()
        if not self._has_left:
            self.committer.say("the keeper is lost: snapshots stay in the memory of the ranks until the next launch")
            if self.committer.rank == 0:  # It held the directory.
                with contextlib.suppress(ArgosyError, OSError):
                    self.committer.owner = take(self.committer.store, "without a keeper")
        for submitted in left:
            self._commit_here(submitted)

    def _hear(self, message: FromKeeper, fds: list[int]) -> None:
        match message:
            case Lent():
                with self._changed:
                    self._answers.append((message, fds))
                    self._changed.notify_all()
            case Durable(name):
                self._done(name, None)
            case Failed(name, reason, overtaken):
                self._done(name, (Overtaken if overtaken else ArgosyError)(reason))
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

    def _commit_here(self, submitted: _Submitted) -> None:
        """Commit from this process, under a name that the keeper did not use."""
        draft, error = submitted.draft, None
        try:
            if not self._is_committed(draft):
                if submitted.is_given_up:
                    raise PeerLost("a rank", "it was replaced meanwhile")
                if submitted.arena.slot:  # That there is no keeper any more was said.
                    self.committer.say(f"step {draft.step} is written by its ranks")
                name = f"{draft.name}0f"
                entries = [msgspec.structs.replace(e, file=e.file.replace(draft.name, name)) for e in draft.entries]
                self.committer.commit(msgspec.structs.replace(draft, name=name, entries=entries), submitted.arena.view)
        except BaseException as caught:
            error = caught
        self._release(submitted.arena)
        submitted.done(error)
        if error is None:
            self.committer.tidy()

    def _is_committed(self, draft: Draft) -> bool:
        try:
            path = f"{draft.name}/{ROOT}"
            unseal(self.committer.store.files.read(path), path)
        except (OSError, ArgosyError):
            return False
        return True

    def lend(self, size: int) -> Arena:
        try:
            with self._changed:
                self._is_lending, link = True, self._link
                if link is not None:
                    link.send(Lend(size))
                    if not self._changed.wait_for(lambda: self._answers or self._link is None, LEND_TIMEOUT_S):
                        raise DeadlinePassed("memory of an earlier save free again", LEND_TIMEOUT_S)
                if self._link is not None:
                    message, fds = self._answers.pop(0)
                    if fds:
                        self._lent[message.slot] = Arena(size, fds[0], message.slot)
                    arena = self._lent[message.slot]
                    self._used.add(arena)
                    return arena
        except PeerLost:
            pass
        finally:
            self._is_lending = False
        return self._own.lend(size)

    def submit(self, draft: Draft, filling: Snapshotting, done: Done) -> None:
        arena = filling.arena
        try:
            draft = msgspec.structs.replace(draft, entries=filling.entries())
            data = msgspec.json.encode(draft)
        except Exception as error:
            self.abandon(draft.name, arena, str(error))
            done(error)
            return
        submitted = _Submitted(draft, arena, done)
        if not arena.slot or not self._handed_over(submitted, data):
            self._listener.join()  # All ranks write what they have to in the same order.
            self._commit_here(submitted)

    def _handed_over(self, submitted: _Submitted, data: bytes) -> bool:
        """Give a snapshot to the keeper; False if it is lost."""
        draft, arena = submitted.draft, submitted.arena
        arena.finish()
        filled = Filled(arena.slot, arena.sequence, draft.name, draft.step, bool(draft.tags), digest(data))
        fd = memory_of(data)
        # If the keeper is lost, the listening thread finds the same, and commits what is submitted.
        is_kept = False
        with self._changed, contextlib.suppress(PeerLost):
            if self._link is not None:
                is_kept, self._submitted[draft.name] = True, submitted
                self._link.send(filled, [fd])
        os.close(fd)
        return is_kept

    def _release(self, arena: Arena) -> None:
        """An arena is used no more; with the last one of the keeper's a closed writer leaves."""
        if not arena.slot:
            self._own.take_back(arena)
            return
        with self._changed:
            self._used.discard(arena)
            if self._link is None and self._lent.pop(arena.slot, None) is not None:
                arena.close()
            is_last = self._is_closing and not self._used
        if is_last:
            self._leave()

    def abandon(self, name: str, arena: Arena | None, reason: str) -> None:
        """Give an arena back without a snapshot, and tell the other ranks that step `name` will not be."""
        link: Link[FromKeeper] | None = None
        with self._changed, contextlib.suppress(PeerLost):
            link = self._link if arena is None or arena.slot else None
            if link is not None:
                link.send(Torn(arena.slot if arena is not None else 0, name, reason))
        if link is None:
            self._own.abandon(name, None, reason)
        if arena is not None:
            self._release(arena)

    def let_go(self) -> None:
        """Wait no more for other ranks' parts: the keeper tells what becomes of them, while it lives."""
        with self._changed:
            self._submitted = {name: each._replace(is_given_up=True) for name, each in self._submitted.items()}
        self.committer.let_go()

    def close(self) -> None:
        """Leave the keeper, once the last snapshot under way is copied and written."""
        with self._changed:
            self._is_closing = True
            is_last = not self._used
        if is_last:
            self._leave()

    def _leave(self) -> None:
        with self._changed, contextlib.suppress(PeerLost):
            self._has_left = True
            if self._link is not None:
                self._link.send(Bye())
        if self._listener is not current_thread():
            self._listener.join(CLOSE_S)
        self._own.close()
