"""One run on simulated hosts: their network, the engine that gives them, the client, and the invariants.

W1  The run ends, once.
W2  Of the processes that live, at most one of a slot is in the current view; none starts in a view that nobody opened.
W3  No process outlives the run.
W4  The exit code and the reason are those of the first failure that was not handled.
W5  In the end every host has cleared up, or is known to be lost.
W6  Restarts stay within their budget.
W7  The log of a killed agent replays to the same state.
W8  A signal is sent once, and nobody is stopped because of a failure before evidence of it was taken.
W9  No rank starts on a device that was excluded.
"""

import itertools
from collections.abc import Container
from dataclasses import dataclass
from functools import partial

import msgspec

from argosy.control import (
    Acknowledged,
    ClientCame,
    Connected,
    Finish,
    Forgotten,
    ForkRanks,
    ForRun,
    Launched,
    Letter,
    NodeEffect,
    NodeState,
    OfHost,
    OfRun,
    Restart,
    RunEvent,
    RunState,
    SendSignal,
    SignalRanks,
    TakeEvidence,
    facts,
)
from argosy.core import RankId
from argosy.sim.fleet.crowd import Crowd
from argosy.sim.fleet.faults import Faults
from argosy.sim.fleet.sim_agent import Outside, SimAgent
from argosy.sim.fleet.sim_process import RUN, sim_launch
from argosy.sim.fleet.world import World

AGAIN_S = 1.0
"""Connections are made again after this long."""
ACKNOWLEDGE_S = 60.0
"""How long letters to hosts of equal fate wait until they count as taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """How large a run is, and what is restarted when something of it fails."""

    hosts: int
    ranks: int
    restart: Restart
    spare_hosts: int = 0
    folded: frozenset[int] = frozenset()
    """Hosts to which nothing happens: they are simulated as one."""


class SimRun:
    """The run and all that it stands on."""

    def __init__(self, seed: int, faults: Faults, plan: RunPlan, crash_at: Container[int] = ()) -> None:
        world = self.world = World(seed, faults, crash_at)
        hosts, ranks, restart = plan.hosts, plan.ranks, plan.restart
        self.restart = restart
        self.told: list[facts.AnyFact] = []
        self.finished: list[Finish] = []
        self._facts: set[bytes] = set()
        self._looked_into: set[str] = set()
        """The causes that evidence was taken for."""
        self._waiting: set[str] = set()
        """Hosts whose connection is made again soon."""
        self._viewed = (0, 0, 0)
        self.indices = range(ranks)
        names = [f"host{number}" for number in range(hosts + plan.spare_hosts)]
        placed = [names[index * hosts // ranks] for index in range(ranks)]
        first_ranks = {placed[index]: index for index in reversed(self.indices)}
        equal = {names[i]: first_ranks[names[i]] for i in range(1, hosts) if i in plan.folded}
        self.crowd = Crowd(world, equal) if equal else None
        zygote_dies = world.random.choice(faults.zygote_dies)
        managed, grouped = world.happens(faults.managed), world.happens(faults.grouped)
        spares = world.random.choice(faults.spares)
        outside = Outside(
            send=self._send,
            record=self._record,
            finish=self._finish,
            before=self._before,
            came=self._came,
            view=self._view,
        )
        self.agents = {
            name: SimAgent(world, name, outside, spares, zygote_dies, managed, grouped)
            for name in names
            if name not in equal or (self.crowd is not None and name == self.crowd.speaker)
        }
        self.hosts = list(self.agents.values())
        self.head = self.hosts[0]
        launch = sim_launch(
            dims={"pair": ranks // 2, "one": 2} if restart.along else {"rank": ranks},
            nodes=hosts if ranks % hosts == 0 else 1,
            spares=spares,
            spare_devices=["spare"] if faults.device_fails and world.happens(0.5) else [],
            kind="program" if world.happens(faults.programs) else "script",
            restart=restart,
            detached=world.happens(faults.detached),
        )
        self.launched = Launched(run=RUN, number=1, launch=launch, hosts=placed, spares=names[hosts:])

    @property
    def state(self) -> RunState | None:
        """The run as its head knows it."""
        return self.head.state.runs.get(RUN)

    def run(self, stops: list[tuple[float, RunEvent]], events_max: int = 20_000) -> Finish:
        """Let the run live to its end (W1)."""
        world = self.world
        world.after(0.0, self._begin)
        for at, event in stops:
            world.after(at, partial(self.head.feed, ForRun(RUN, event)))
        for _ in range(events_max):
            if self.finished and not self._remains():
                return self.finished[0]
            world.require(world.advance(), "W1", "nothing will ever happen, and the run has not ended")
            self._check_view()
        world.require(False, "W1", "the run does not end")
        raise AssertionError

    def _remains(self) -> bool:
        return any(RUN in (*each.state.runs, *each.state.host.runs) for each in self.hosts if not each.gone)

    # --- the client

    def _begin(self) -> None:
        """The client launches; it tries again where the agent was killed before it took the launch down."""
        if not self.head.up:
            self.world.after(1.0, self._begin)
            return
        self.head.feed(self.launched)
        if not self.head.up:
            self.world.after(4.0, self._begin)
        else:
            self._look_in()

    def _look_in(self) -> None:
        """The client that launched connects to each new agent."""
        if self.head.up and (state := self.state) is not None:
            if not state.launch.detached and state.lease_until is not None:
                self.head.feed(ForRun(RUN, ClientCame()))
            self.world.after(3.0, self._look_in)

    # --- the network

    def _send(self, sender: str, letter: Letter) -> None:
        """Deliver a letter late, twice, or not at all."""
        world, faults = self.world, self.world.faults
        host = letter.peer if sender == self.head.name else sender
        folded = self.crowd is not None and host in self.crowd.shifts and host == letter.peer
        if folded and self.crowd is not None and not self.crowd.order(letter):
            return
        self._connect_later(host)
        lost = world.happens(faults.letter_lost)
        if lost or not (self.agents[host].hears if host == letter.peer else self.agents[host].heard):
            return
        for _ in range(2 if world.happens(faults.letter_twice) else 1):
            world.after(world.within(faults.latency_s), partial(self._arrive, sender, letter))

    def _arrive(self, sender: str, letter: Letter) -> None:
        if self.crowd is not None and sender == self.crowd.speaker:
            for each in self.crowd.said(letter):
                self.head.feed(each)
        else:
            self.agents[letter.peer].feed(Letter(sender, letter.number, letter.run, letter.content))

    def _came(self, name: str) -> None:
        for host in self.agents if name == self.head.name else (name,):
            if host != self.head.name:
                self._connect_later(host)

    def _connect_later(self, host: str) -> None:
        if host not in self._waiting:
            self._waiting.add(host)
            is_crowd = self.crowd is not None and host == self.crowd.speaker
            self.world.after(ACKNOWLEDGE_S if is_crowd else AGAIN_S, partial(self._connect, host))

    def _connect(self, host: str) -> None:
        """Head and host tell each other what they have taken; who has more to say repeats it."""
        self._waiting.discard(host)
        head, other = self.head, self.agents[host]
        if other.gone:
            return
        if head.up and other.up and other.hears and other.heard:
            for one, two in ((head, other), (other, head)):
                theirs = two.state.mail.get(one.name)
                if one.state.mail.get(two.name) is not None:
                    one.feed(Connected(two.name, 0 if theirs is None else theirs.taken))
            if self.crowd is not None and host == self.crowd.speaker:
                taken = other.state.mail[head.name].taken if head.name in other.state.mail else 0
                for name in self.crowd.shifts:
                    head.feed(Acknowledged(name, taken))
        mails = (head.state.mail.get(host), other.state.mail.get(head.name))
        if any(mail is not None and mail.waiting for mail in mails):
            self._connect_later(host)

    # --- what the agents do

    def _view(self) -> int | None:
        return None if (state := self.state) is None else state.view

    def _record(self, fact: facts.AnyFact) -> None:
        """The journal takes a fact once."""
        if (encoded := msgspec.msgpack.encode(fact)) not in self._facts:
            self._facts.add(encoded)
            self.told.append(fact)

    def _finish(self, finish: Finish) -> None:
        same = all(each == finish for each in self.finished)
        self.world.require(same, "W1", f"two ends: {self.finished} {finish}")
        self.finished.append(finish)
        if (state := self.state) is not None:
            for name in sorted({*state.lost, *state.spares, *state.clearing} - {self.head.name}):
                self.agents[name].lose_power()  # They are given back to their engine.
        self.world.after(0.0, partial(self.head.feed, Forgotten(RUN)))

    # --- invariants

    def _before(self, state: NodeState, effect: NodeEffect) -> None:
        match effect:
            case OfRun(_, TakeEvidence(_, cause)):
                self._looked_into.add(cause)
            case Letter(run=run, content=SignalRanks(ranks)):
                self._check_evidence(state.runs[run], ranks)
            case OfHost(SendSignal(run, rank)) if run in state.runs:
                self._check_evidence(state.runs[run], (rank,))
            case OfHost(ForkRanks(ranks=ranks, devices=given)) if self.state is not None:
                excluded = {*self.state.devices.excluded.get(state.name, ())}
                used = {given.get(rank.index) or f"of rank {rank.index}" for rank in ranks}
                self.world.require(not used & excluded, "W9", f"{ranks} start on devices {used & excluded}")
            case _:
                pass

    def _check_evidence(self, state: RunState, ranks: tuple[RankId, ...]) -> None:
        """W8."""
        takedowns = {state.slots[rank.index].takedown for rank in ranks if rank == state.rank(rank.index)}
        causes = {state.takedowns[number].cause for number in takedowns if number in state.takedowns}
        unseen = {cause for cause in causes if cause.startswith("rank")} - self._looked_into
        self.world.require(not unseen, "W8", f"{ranks} are stopped before evidence is taken: {unseen}")

    def _check_view(self) -> None:
        """W2, whenever processes or members came."""
        state = self.state
        seen = (self.world.processes, 0, 0) if state is None else (self.world.processes, state.view, state.alive)
        if seen == self._viewed:
            return
        self._viewed = seen
        alive = [each for host in self.hosts for each in host.processes if each.status is None and not each.killed]
        members = [each.rank.index for each in alive if state is not None and state.is_member(each.rank)]
        self.world.require(len(members) == len(set(members)), "W2", f"two members of a slot: {members}")

    def check_end(self) -> Finish:
        """The run ended as it should: nobody is left, in its budget, with code and name of the first failure."""
        require, end = self.world.require, self.finished[0]
        living = [p.rank for agent in self.hosts for p in agent.processes if p.status is None]
        require(not living, "W3", f"{living} outlive the run")
        left = [each.name for each in self.hosts if not each.gone and RUN in each.state.host.runs]
        require(not left, "W5", f"{left} did not clear up")
        restarting = [fact for fact in self.told if isinstance(fact, facts.Restarting)]
        at_once = sum(after.at - before.at < 1.0 for before, after in itertools.pairwise(restarting))
        if self.restart.max_restarts is not None:
            counted = len(restarting) - at_once
            require(counted <= self.restart.max_restarts, "W6", f"{counted} restarts of {self.restart.max_restarts}")
        last = dict.fromkeys(self.indices, 0)
        for fact in restarting:
            last.update({index: max(last[index], fact.generation) for index in fact.ranks})
        self._check_reason(end, last)
        return end

    def _check_reason(self, end: Finish, last: dict[int, int]) -> None:
        """W4; `last` has each slot's last generation."""
        require = self.world.require
        exits = [fact for fact in self.told if isinstance(fact, facts.RankExited)]
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
