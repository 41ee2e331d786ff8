"""What must always hold in a run on simulated hosts.

W1  The run ends, once.
W2  Of the processes that live, at most one of a slot is in the current view; none starts in a view that nobody opened,
    and each generation of a slot starts in a later view than the one before.
W3  No process outlives the run, or for long the signal that it was stopped with.
W4  The exit code and the reason are those of the first failure that was not handled.
W5  In the end every host has cleared up, or is known to be lost. The run ends when its hosts have, or could have.
W6  Restarts stay within their budget.
W7  The log of a killed agent replays to the same state.
W8  A signal is sent once, and nobody is stopped because of a failure before evidence of it was taken.
W9  What a lost host says leads to nothing; if it comes back, it loses its ranks.
W10 A run ends soon after its client, unless it is detached.
W11 No rank starts on a device that was excluded.
"""

import itertools
from collections.abc import Generator
from contextlib import contextmanager

from argosy.control import (
    ChildForked,
    Connected,
    EvidenceTaken,
    Finish,
    ForHost,
    ForkRanks,
    ForRun,
    Hung,
    Letter,
    NodeEffect,
    NodeEvent,
    NodeState,
    OfHost,
    OfRun,
    Restart,
    RunState,
    SendSignal,
    SignalRanks,
    TakeEvidence,
    facts,
)
from argosy.core import RankId
from argosy.sim.fleet.sim_agent import SimAgent
from argosy.sim.fleet.sim_process import RUN
from argosy.sim.fleet.world import World

EVIDENCE_S = 10.0
"""Evidence that takes longer is not awaited."""
RETURNED_S = 60.0
"""A lost host that could be reached for this long has nothing of the run any more."""
CLIENT_S = 120.0
"""The run of a client that left ends within this time, and that of hosts that cannot be reached."""


class RunInvariants:
    """What was seen of a run, as far as it must hold."""

    def __init__(self, world: World, hosts: list[SimAgent], ranks: int, restart: Restart) -> None:
        self._world, self._hosts, self._restart = world, hosts, restart
        self._indices = range(ranks)
        self.client_left_at: float | None = None
        self._hung_at = 0.0
        self._decided_before = False
        """Signals that follow from the event were decided on earlier, perhaps because of another failure."""
        self._exited_at: dict[RankId, float] = {}
        self._asked_for: dict[str, RankId] = {}
        """The causes that evidence was asked for, and the rank that failed."""
        self._looked_into: set[RankId] = set()
        self._views: dict[int, tuple[int, int]] = {}
        """The newest generation that was started of each slot, and in which view."""
        self._seen = (0, 0, 0)

    # --- while the run lives

    def heard(self, event: NodeEvent) -> None:
        """An agent is about to react."""
        self._decided_before = isinstance(event, Connected) or (
            isinstance(event, ForHost) and isinstance(event.event, ChildForked)
        )
        match event:
            case ForRun(_, EvidenceTaken(rank)):
                self._looked_into.add(rank)
            case ForRun(_, Hung()):
                self._hung_at = self._world.now
            case _:
                pass

    def recorded(self, fact: facts.AnyFact) -> None:
        """A fact came into the journal."""
        if isinstance(fact, facts.RankExited):
            self._exited_at[fact.rank] = fact.at

    def before(self, state: NodeState, effect: NodeEffect) -> None:
        """An agent is about to perform an effect."""
        match effect:
            case OfRun(_, TakeEvidence(first, cause)):
                self._asked_for[cause] = first
            case Letter(run=run, content=SignalRanks(ranks)) if not self._decided_before:
                self._check_evidence(state.runs[run], ranks)
            case OfHost(SendSignal(run, rank)) if run in state.runs and not self._decided_before:
                self._check_evidence(state.runs[run], (rank,))
            case OfHost(ForkRanks(ranks=ranks, view=view, devices=given)):
                self._check_views(ranks, view)
                self._check_devices(state.name, ranks, given)
            case _:
                pass

    def _check_evidence(self, state: RunState, ranks: tuple[RankId, ...]) -> None:
        """W8."""
        takedowns = {state.slots[rank.index].takedown for rank in ranks if rank == state.rank(rank.index)}
        for cause in {state.takedowns[number].cause for number in takedowns if number in state.takedowns}:
            if cause.startswith("rank"):
                first = self._asked_for.get(cause)
                self._world.require(first, "W8", f"{ranks} are stopped, and nobody looked into {cause}")
                assert first is not None
                failed_at = self._hung_at if "hung" in cause else self._exited_at[first]
                looked = first in self._looked_into or self._world.now >= failed_at + EVIDENCE_S
                self._world.require(looked, "W8", f"{ranks} are stopped before evidence is taken: {cause}")

    def _check_views(self, ranks: tuple[RankId, ...], view: int) -> None:
        """W2, when ranks start."""
        for rank in ranks:
            generation, before = self._views.get(rank.index, (-1, 0))
            if rank.generation > generation:
                self._world.require(view > before, "W2", f"{rank} starts in view {view}, as generation {generation}")
                self._views[rank.index] = (rank.generation, view)

    def _check_devices(self, host: str, ranks: tuple[RankId, ...], given: dict[int, str]) -> None:
        """W11."""
        state = self._hosts[0].state.runs.get(RUN)
        excluded = set[str]() if state is None else {*state.devices.excluded.get(host, ())}
        used = {given.get(rank.index) or f"of rank {rank.index}" for rank in ranks}
        self._world.require(not used & excluded, "W11", f"{ranks} start on devices {used & excluded}")

    def check_members(self, state: RunState | None) -> None:
        """W2, whenever processes or members came."""
        processes = self._world.processes
        seen = (processes, 0, 0) if state is None else (processes, state.view, state.alive)
        if seen == self._seen:
            return
        self._seen = seen
        alive = [each for host in self._hosts for each in host.processes if each.status is None and not each.killed]
        members = [each.rank.index for each in alive if state is not None and state.is_member(each.rank)]
        self._world.require(len(members) == len(set(members)), "W2", f"two members of a slot: {members}")

    @contextmanager
    def fence(self, state: RunState | None, sender: str, receiver: SimAgent) -> Generator[None]:
        """W9, while an agent takes a letter."""
        is_lost = state is not None and sender in state.lost
        effects = receiver.state.effects
        yield
        self._world.require(
            not is_lost or receiver.state.effects == effects, "W9", f"something follows from what {sender} says"
        )

    def check_returned(self, state: RunState | None, agent: SimAgent) -> None:
        """W9, `RETURNED_S` after a host could be reached again."""
        if state is None or state.ended or agent.name not in state.lost or agent.gone:
            return
        if agent.hears and agent.heard and agent.reached_at + RETURNED_S <= self._world.now:
            living = [each.rank for each in agent.processes if each.status is None]
            kept = living or RUN in agent.state.host.runs
            self._world.require(not kept, "W9", f"{agent.name} is lost, came back, and keeps the run: {living}")

    # --- at its end

    def check_finish(self, end: Finish, state: RunState) -> None:
        """W4, W5 and W10, when the run says that it ends."""
        require, now = self._world.require, self._world.now
        waited = [each for each in self._hosts if not each.gone and each.name in state.hosts]
        left = [each.name for each in waited if RUN in each.state.host.runs]
        late = state.outcome is not None and now >= state.outcome[2]
        require(late or not left, "W5", f"the run ends before {left} cleared up")
        require("no spare host" not in end.reason or not state.spares, "W4", f"{end}, but there is {state.spares}")
        if self.client_left_at is not None:
            after_s = now - self.client_left_at
            require(after_s < CLIENT_S + self._world.faults.cut_s[1], "W10", f"its client left {after_s:.0f} s ago")

    def check_end(self, end: Finish, told: list[facts.AnyFact]) -> None:
        """Nobody is left, the run stayed in its budget, and it has the code and the reason of the first failure."""
        require = self._world.require
        living = [p.rank for agent in self._hosts for p in agent.processes if p.status is None]
        require(not living, "W3", f"{living} outlive the run")
        left = [each.name for each in self._hosts if not each.gone and RUN in each.state.host.runs]
        require(not left, "W5", f"{left} did not clear up")
        restarting = [fact for fact in told if isinstance(fact, facts.Restarting)]
        at_once = sum(after.at - before.at < 1.0 for before, after in itertools.pairwise(restarting))
        allowed = self._restart.max_restarts
        if allowed is not None:
            counted = len(restarting) - at_once
            require(counted <= allowed, "W6", f"{counted} restarts of {allowed}")
        last = dict.fromkeys(self._indices, 0)
        for fact in restarting:
            last.update({index: max(last[index], fact.generation) for index in fact.ranks})
        self._check_reason(end, last, told)

    def _check_reason(self, end: Finish, last: dict[int, int], told: list[facts.AnyFact]) -> None:
        """W4; `last` has each slot's last generation."""
        require = self._world.require
        exits = [fact for fact in told if isinstance(fact, facts.RankExited)]
        failed = [exit for exit in exits if not exit.status.ok and not exit.asked]
        final = [exit for exit in failed if exit.rank.generation == last[exit.rank.index]]
        if end.reason.startswith("rank") and "hung" not in end.reason:
            require(final, "W4", f"{end}")
            require(end.code == final[0].status.shell_code, "W4", f"{end} after {final[0]}")
            require(end.reason.startswith(f"rank {final[0].rank.index}:"), "W4", f"{end} after {final[0]}")
        elif end.reason.startswith("every rank"):
            done = {exit.rank for exit in exits if exit.status.ok}
            wanted = {RankId("main", index, generation) for index, generation in last.items()}
            require(end.code == 0, "W4", f"{end}")
            require(done >= wanted, "W4", f"{end}, but {sorted(wanted - done)[:5]} are not done")
        else:
            require(end.code != 0, "W4", f"{end}")
