"""The zygotes of this host as the agent reaches them: executed by the warden, told what to import, asked to fork."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from argosy.control import (
    ForHost,
    ImportIn,
    RememberSpoiled,
    RetireZygote,
    SpawnZygote,
    ZygoteCame,
    ZygoteLoaded,
    ZygoteLost,
    ZygoteRefused,
    ZygoteSpawned,
    imports_id,
    rank_defaults,
)
from argosy.core import ArgosyError, ProcessId, RankId
from argosy.fabric import Link, cache_dir
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.hosted_run import HostedRun
from argosy.supervise.agent.warden_link import WardenLink
from argosy.supervise.evidence.log_excerpt import log_tail
from argosy.supervise.imports.zygote_key import remember_reads
from argosy.supervise.messages import Child, Preload, RankSpec, Retire, Spawn, ToAgent, ZygoteHello, ZygoteReady
from argosy.supervise.rank.preload import PRELOAD_ENV
from argosy.supervise.records.rundir import write_atomically

PROGRAM = "import sys; fresh = frozenset(sys.modules); from argosy.supervise.rank.zygote import main; main(fresh)"


class ZygoteLinks:
    """The connections of zygotes."""

    def __init__(self, runtime: Path, decisions: Decisions, runs: Mapping[str, HostedRun], warden: WardenLink) -> None:
        self._runtime, self._decisions, self._runs, self._warden = runtime, decisions, runs, warden
        self._links: dict[ProcessId, Link[ToAgent]] = {}

    # --- effects

    def spawn(self, effect: SpawnZygote) -> None:
        """Execute a zygote in the environment of a run, without its secrets: other runs share the zygote."""
        run = self._runs[effect.run]
        python, log = run.launch.python, str(self._runtime / f"zygote-{effect.key}.out")
        argv = [python[0], *python[1:], "-u", "-c", PROGRAM, str(self._runtime), effect.key]
        spec = RankSpec(RankId("zygote", 0), dict(PRELOAD_ENV), log, log, defaults=rank_defaults(run.launch))
        message = Spawn(effect.key, spec, argv, "/", 0o077, what="zygote")
        self._warden.send(message, [run.environment.sealed])

    def import_in(self, effect: ImportIn) -> None:
        self.send(effect.process, Preload(list(effect.entries), effect.imports))

    def retire(self, effect: RetireZygote) -> None:
        self.send(effect.process, Retire())

    def remember(self, effect: RememberSpoiled) -> None:
        """Keep what spoiled a zygote; where that cannot be written it is found out again."""
        path = _memory(effect.fingerprint)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            known = {**_left_out(effect.fingerprint), **dict(effect.spoiled)}
            write_atomically(path, msgspec.json.encode(known))

    # --- events

    def came(self, link: Link[ToAgent], hello: ZygoteHello) -> None:
        """A zygote connected, for the first time or after a restart of the agent."""
        self._links[hello.process] = link
        zygote = self._decisions.state.host.zygotes.get(hello.key)
        known = _left_out(zygote.launch.fingerprint) if zygote is not None and zygote.launch is not None else {}
        event = ZygoteCame(hello.key, hello.process, hello.ready, hello.shared_key, tuple(known))
        self._decisions.feed(ForHost(event))

    def loaded(self, link: Link[ToAgent], message: ZygoteReady) -> None:
        """A zygote has imported what it was told to."""
        process = self._process_of(link)
        zygote = self._decisions.state.host.zygotes.get(message.key)
        if process is None or zygote is None:
            return
        if zygote.launch is not None and not message.spoiled:
            remember_reads(imports_id(zygote.launch), message.read)
        event = ZygoteLoaded(message.key, process, message.shared_key, tuple(message.spoiled))
        self._decisions.feed(ForHost(event))

    def spawned(self, child: Child) -> None:
        self._decisions.feed(ForHost(ZygoteSpawned(child.run, child.process)))

    def refused(self, key: str, reason: str) -> None:
        self._decisions.feed(ForHost(ZygoteRefused(key, reason)))

    def dropped(self, link: Link[ToAgent]) -> None:
        """A connection ended; if it was a zygote's, that is of no use any more."""
        process = self._process_of(link)
        if process is not None:
            del self._links[process]
            zygotes = self._decisions.state.host.zygotes.items()
            for key in [key for key, zygote in zygotes if zygote.process == process]:
                self.ended(key, process)

    def ended(self, key: str, process: ProcessId) -> None:
        """A zygote is gone. Its log names what it imported last."""
        importing = "zygote: importing "
        lines = log_tail(self._runtime / f"zygote-{key}.out").splitlines()
        last = [line.removeprefix(importing) for line in lines if line.startswith(importing)]
        self._decisions.feed(ForHost(ZygoteLost(key, process, last[-1] if last else "")))

    # --- for others

    def of_run(self, run: str) -> ProcessId | None:
        """The zygote that forks the ranks of a run, if one is connected."""
        host = self._decisions.state.host
        zygote = host.zygotes.get(host.runs[run].key) if run in host.runs else None
        return zygote.process if zygote is not None and zygote.process in self._links else None

    def send(self, process: ProcessId | None, message: object, fds: list[int] | None = None) -> bool:
        """Send to a zygote; False if it is gone, which is told apart from this."""
        link = self._links.get(process) if process is not None else None
        if link is None:
            return False
        try:
            link.send(message, fds or [])
        except ArgosyError:
            return False
        return True

    def _process_of(self, link: Link[ToAgent]) -> ProcessId | None:
        return next((process for process, known in self._links.items() if known is link), None)


def _left_out(fingerprint: str) -> dict[str, str]:
    """What is known to spoil a zygote with these packages, and why."""
    try:
        return msgspec.json.decode(_memory(fingerprint).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def _memory(fingerprint: str) -> Path:
    return cache_dir() / "left-out" / f"{fingerprint}.json"
