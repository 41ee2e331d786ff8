"""Ranks on other hosts, as the head of their run sees them: progress, processes, stacks.

A host sends what its ranks show with its beats. Stacks are asked for, and taken on the host.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from argosy.core import RankId
from argosy.fabric import Link
from argosy.observe import RankProgress
from argosy.supervise.agent.host_messages import RankSeen, RanksSeen, StacksTaken, TakeHostStacks
from argosy.supervise.agent.tunnels import TunnelRelay
from argosy.supervise.evidence.frames import Stack
from argosy.supervise.evidence.proc_sample import ProcSample
from argosy.supervise.evidence.stacks import StackTaking
from argosy.supervise.messages import OpenTunnel, Refused, ToAgent

STALE_S = 3.0
"""A host that has told nothing for this long is not judged."""
LATE_S = 1.0
"""How much longer than its own deadline a host may take to send stacks."""


class AskedHost(Protocol):
    """A host that can be asked."""

    @property
    def is_there(self) -> bool: ...

    def send(self, message: object) -> None: ...


class RemoteRanks:
    """What the `hosts` of one run have told last."""

    def __init__(self, run: str, hosts: Mapping[str, AskedHost]) -> None:
        self._run, self._hosts = run, hosts
        self.tunnels = TunnelRelay()
        self._seen: dict[int, tuple[RankSeen, float]] = {}
        self._taking: dict[int, RemoteTaking] = {}
        self._numbers = 0

    def hear(self, message: RanksSeen | StacksTaken) -> None:
        """A host tells."""
        match message:
            case RanksSeen(ranks):
                now = time.monotonic()
                for seen in ranks:
                    self._seen[seen.rank.index] = seen, now
            case StacksTaken(number, stacks):
                if (taking := self._taking.get(number)) is not None:
                    taking.answered(number, stacks)

    def reach(self, link: Link[ToAgent], host: str, message: OpenTunnel) -> None:
        """Connect a client with a rank on this host."""
        if host in self._hosts and self._hosts[host].is_there:
            self.tunnels.open(link, self._hosts[host], message)
        else:
            link.send(Refused(f"the host of rank {message.rank} cannot be reached now: {host}"))

    def find(self, rank: RankId) -> RankSeen | None:
        """What a rank showed last, if it is this generation."""
        seen = self._seen.get(rank.index)
        return seen[0] if seen is not None and seen[0].rank == rank else None

    def progress(self, ranks: Sequence[RankId]) -> dict[int, RankProgress]:
        """What the pages of these ranks said."""
        found = [(rank.index, self.find(rank)) for rank in ranks]
        return {index: seen.progress for index, seen in found if seen is not None and seen.progress is not None}

    def proc(self, rank: RankId) -> ProcSample | None:
        """The process of a rank."""
        seen = self.find(rank)
        return None if seen is None else seen.proc

    def is_stale(self, rank: RankId) -> bool:
        """Whether nothing is known of how this rank fares now."""
        seen = self._seen.get(rank.index)
        return seen is None or seen[0].rank != rank or time.monotonic() - seen[1] > STALE_S

    def take(self, ranks: Mapping[RankId, str], deadline_s: float, native: Sequence[int]) -> "RemoteTaking":
        """Have stacks taken by the hosts that `ranks` names."""
        taking = RemoteTaking([rank.index for rank in ranks], time.monotonic() + deadline_s + LATE_S, self._forget)
        for name in sorted(set(ranks.values()) & set(self._hosts)):
            self._numbers += 1
            self._taking[self._numbers] = taking
            taking.numbers.add(self._numbers)
            chosen = [rank for rank, host in ranks.items() if host == name]
            self._hosts[name].send(TakeHostStacks(self._numbers, self._run, chosen, list(native), deadline_s))
        return taking

    def _forget(self, taking: "RemoteTaking") -> None:
        self._taking = {number: each for number, each in self._taking.items() if each is not taking}


class RemoteTaking:
    """Stacks that other hosts take."""

    def __init__(
        self,
        ranks: Sequence[int],
        ends_at: float,
        forget: Callable[["RemoteTaking"], None],
    ) -> None:
        self._ranks, self._ends_at, self._forget = ranks, ends_at, forget
        self._stacks: dict[int, Stack] = {}
        self.numbers: set[int] = set()
        """Of the requests that were not answered yet."""

    def answered(self, number: int, stacks: dict[int, Stack]) -> None:
        self.numbers.discard(number)
        self._stacks |= stacks

    def step(self, now: float) -> bool:
        if self.numbers and now >= self._ends_at:
            self.close()
        return not self.numbers

    def result(self) -> dict[int, Stack]:
        return dict(sorted(self._stacks.items()))

    def close(self) -> None:
        self.numbers.clear()
        self._forget(self)
        for index in self._ranks:
            self._stacks.setdefault(index, Stack("proc", note="its host did not answer in time"))


class AllTaking:
    """Stacks of ranks here and elsewhere."""

    def __init__(self, parts: Sequence[StackTaking]) -> None:
        self._parts = parts

    def step(self, now: float) -> bool:
        unfinished = [part for part in self._parts if not part.step(now)]
        return not unfinished

    def result(self) -> dict[int, Stack]:
        found: dict[int, Stack] = {}
        for part in self._parts:
            found |= part.result()
        return dict(sorted(found.items()))

    def close(self) -> None:
        for part in self._parts:
            part.close()
