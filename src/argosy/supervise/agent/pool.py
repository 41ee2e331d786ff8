"""The agent's zygotes: started when a launch needs one, kept warm, replaced when a package spoils one."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from argosy.control import Launch, rank_defaults
from argosy.core import PeerLost, RankId
from argosy.fabric import Link, cache_dir
from argosy.supervise.evidence.proc_sample import log_tail
from argosy.supervise.imports.scan import OF_TORCH, TORCH
from argosy.supervise.imports.zygote_key import imports_id, remember_reads
from argosy.supervise.messages import (
    Child,
    Preload,
    RankSpec,
    Release,
    Retire,
    Spawn,
    ToAgent,
    ZygoteHello,
    ZygoteReady,
)
from argosy.supervise.rank.preload import PRELOAD_ENV, Preloaded, without
from argosy.supervise.records.rundir import write_atomically

WARM_MAX = 4
TRIES_MAX = 4

Ready = Callable[["Zygote | None"], None]
"""Called with the zygote, or with None if ranks must be executed."""


class Zygote:
    """One zygote as the agent sees it; `launch` is what it was started for, None if an earlier agent did."""

    def __init__(self, key: str, launch: Launch | None = None, entries: Sequence[str] = ()) -> None:
        self.key, self.entries = key, list(entries)
        self.launch = launch
        self.link: Link[ToAgent] | None = None
        self.pid = 0
        self.ready = False
        self.shared_key = ""
        """The key of all launches that it can serve, when it is ready."""
        self.tries = 1
        self.used_at = time.monotonic()
        self.began_at = time.monotonic()
        self.waiting: list[tuple[Ready, Callable[[str], None]]] = []


class Pool:
    """All zygotes of this host's agent, by key."""

    def __init__(self, runtime: Path, spawn: Callable[[Spawn, list[int]], None]) -> None:
        self.runtime = runtime
        self._spawn = spawn
        self.zygotes: dict[str, Zygote] = {}
        self._sealed: dict[str, int] = {}

    def key_for(self, launch: Launch) -> str:
        """The key of the zygote that serves a launch: its own, or that of one with other values of unread variables."""
        serve = (zygote.key for zygote in self.zygotes.values() if zygote.ready and zygote.shared_key == launch.key)
        return next(serve, launch.key)

    def want(self, launch: Launch, sealed: int, ready: Ready, notice: Callable[[str], None]) -> None:
        """Call `ready` when the launch's zygote can fork; `notice` hears what is worth a line."""
        zygote = self.zygotes.get(launch.key)
        if zygote is not None and zygote.ready and zygote.link is not None:
            zygote.used_at = time.monotonic()
            ready(zygote)
            return
        if zygote is None:
            entries = without(launch.preload, list(self.left_out(launch)))
            if len(entries) < len(launch.preload) and _needs_torch(launch.preload):
                entries = [*TORCH, *(entry for entry in entries if entry not in TORCH)]
            zygote = self.zygotes[launch.key] = Zygote(launch.key, launch, entries)
            self._sealed[launch.key] = os.dup(sealed)
            self._start(zygote)
        zygote.waiting.append((ready, notice))

    def _start(self, zygote: Zygote) -> None:
        assert zygote.launch is not None
        program = (
            "import sys; fresh = frozenset(sys.modules); from argosy.supervise.rank.zygote import main; main(fresh)"
        )
        argv = [
            zygote.launch.python[0],
            *zygote.launch.python[1:],
            "-u",
            "-c",
            program,
            str(self.runtime),
            zygote.key,
        ]
        log = str(self.runtime / f"zygote-{zygote.key}.out")
        spec = RankSpec(RankId("zygote", 0), dict(PRELOAD_ENV), log, log, defaults=rank_defaults(zygote.launch))
        spawn = Spawn(zygote.key, spec, argv, "/", 0o077, what="zygote", secrets=False)
        self._spawn(spawn, [self._sealed[zygote.key]])

    def greeted(self, hello: ZygoteHello, link: Link[ToAgent]) -> bool:
        """A zygote connected; False if it should retire. One that an earlier agent left ready stays warm."""
        if hello.ready:
            self.zygotes.setdefault(hello.key, Zygote(hello.key))
        zygote = self.zygotes.get(hello.key)
        if zygote is None or (zygote.link is not None and zygote.link is not link):
            return False
        zygote.link, zygote.pid, zygote.ready = link, hello.process.pid, hello.ready
        zygote.shared_key = hello.shared_key
        if hello.ready:
            self._announce(zygote)
        else:
            assert zygote.launch is not None  # It was started for one, or is expected for one.
            link.send(Preload(zygote.entries, imports_id(zygote.launch)))
        return True

    def expect(self, launch: Launch, sealed: int) -> None:
        """Make room for a zygote that an earlier agent had started for `launch`."""
        if launch.key not in self.zygotes:
            self.zygotes[launch.key] = Zygote(launch.key, launch, without(launch.preload, list(self.left_out(launch))))
            self._sealed[launch.key] = os.dup(sealed)

    def will_call(self, launch: Launch, ready: Ready) -> bool:
        """Whether `ready` waits for a zygote to come up."""
        zygote = self.zygotes.get(launch.key)
        return zygote is not None and any(ready == waiting for waiting, _ in zygote.waiting)

    def preloaded(self, message: ZygoteReady) -> None:
        """Preloading ended: use the zygote, or start a fresh one without what spoiled it."""
        zygote = self.zygotes.get(message.key)
        if zygote is None:
            return
        assert zygote.launch is not None  # Only those that were started for one are told to import.
        if not message.spoiled:
            zygote.ready, zygote.shared_key = True, message.shared_key
            remember_reads(imports_id(zygote.launch), message.read)
            self._announce(zygote)
            return
        result = Preloaded((), {}, tuple(message.spoiled), {}, {}, message.has_torch)
        self._remember(zygote.launch, dict(message.spoiled))
        for entry, reason in message.spoiled:
            self._notice(zygote, f"{entry} is imported by each rank, not once for all: {reason}")
        self._again(zygote, result.left(zygote.entries), result.torch_spoiled)

    def _again(self, zygote: Zygote, entries: list[str], hopeless: str | None) -> None:
        if zygote.link is not None:
            zygote.link.send(Retire())
        zygote.link, zygote.pid = None, 0
        zygote.tries += 1
        if hopeless is not None or zygote.tries > TRIES_MAX:
            self._notice(zygote, f"ranks start cold, each with its own imports: {hopeless or 'no zygote came up'}")
            self._forget(zygote.key)
            for ready, _ in zygote.waiting:
                ready(None)
            return
        zygote.entries = entries
        self._start(zygote)

    def spawned(self, child: Child) -> None:
        """A zygote's process exists; one that retires may still live under the same key."""
        if (zygote := self.zygotes.get(child.run)) is not None:
            zygote.pid = child.process.pid

    def exited(self, child: Child) -> None:
        """A zygote's process ended. If it was still importing, what it imported last is left out."""
        zygote = self.zygotes.get(child.run)
        if zygote is None or zygote.pid != child.process.pid:
            return
        if zygote.ready or not zygote.waiting:
            self._forget(zygote.key)
            return
        log = self.runtime / f"zygote-{zygote.key}.out"
        lines = log_tail(log).splitlines()
        last = [line.removeprefix("zygote: importing ") for line in lines if line.startswith("zygote: imp")]
        culprit = last[-1] if last else ""
        self._notice(zygote, f"the zygote died while importing {culprit or 'nothing yet'}; see {log}")
        hopeless = "importing torch killed the zygote" if culprit in OF_TORCH else None
        self._again(zygote, without(zygote.entries, [culprit]), hopeless)

    def failed(self, key: str, reason: str) -> None:
        """The zygote could not even be executed."""
        zygote = self.zygotes.get(key)
        if zygote is not None:
            self._again(zygote, zygote.entries, f"the interpreter cannot be executed: {reason}")

    def lost(self, link: Link[ToAgent]) -> None:
        """A zygote's connection ended; its process's exit follows."""
        for zygote in list(self.zygotes.values()):
            if zygote.link is link:
                zygote.link = None
                if zygote.ready:
                    self._forget(zygote.key)

    def release(self, launch: Launch, run: str) -> None:
        """A run is over: its spares can go."""
        zygote = self.zygotes.get(launch.key)
        if launch.spares and zygote is not None:
            with contextlib.suppress(PeerLost):
                send(zygote, Release(run), [])

    def trim(self, in_use: set[str]) -> None:
        """Retire the longest unused zygotes beyond the bound."""
        idle = sorted((z for z in self.zygotes.values() if z.ready and z.key not in in_use), key=lambda z: z.used_at)
        for zygote in idle[: max(0, len(self.zygotes) - WARM_MAX)]:
            if zygote.link is not None:
                zygote.link.send(Retire())
            self._forget(zygote.key)

    def _announce(self, zygote: Zygote) -> None:
        waiting, zygote.waiting = zygote.waiting, []
        for ready, _ in waiting:
            ready(zygote)

    def _notice(self, zygote: Zygote, text: str) -> None:
        for _, notice in zygote.waiting:
            notice(text)

    def _forget(self, key: str) -> None:
        self.zygotes.pop(key, None)
        if (fd := self._sealed.pop(key, None)) is not None:
            os.close(fd)

    def left_out(self, launch: Launch) -> dict[str, str]:
        """What is known to spoil a zygote in this environment, and why."""
        try:
            known = msgspec.json.decode(_memory(launch).read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError):
            return {}
        return known

    def _remember(self, launch: Launch, spoiled: dict[str, str]) -> None:
        path = _memory(launch)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode({**self.left_out(launch), **spoiled}))
        except OSError:
            return  # It is found out again next time.


def _needs_torch(entries: list[str]) -> bool:
    return "torch" in entries


def _memory(launch: Launch) -> Path:
    return cache_dir() / "left-out" / f"{launch.fingerprint}.json"


def send(zygote: Zygote, message: object, fds: list[int]) -> None:
    """Send to the zygote.

    Raises:
        PeerLost: it is gone.
    """
    if zygote.link is None:
        raise PeerLost("the zygote", "it is gone")
    zygote.link.send(message, fds)
