"""One run on simulated hosts: their network, the engine that gives them, and the client."""

from collections.abc import Container
from dataclasses import dataclass
from functools import partial

import msgspec

from argosy.control import (
    Acknowledged,
    ClientCame,
    ClientLeft,
    Connected,
    Finish,
    Forgotten,
    ForRun,
    Launched,
    Letter,
    Restart,
    RunEvent,
    RunState,
    facts,
)
from argosy.sim.fleet.crowd import Crowd
from argosy.sim.fleet.faults import Faults
from argosy.sim.fleet.run_invariants import RunInvariants
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
        self.told: list[facts.AnyFact] = []
        self.finished: list[Finish] = []
        self._facts: set[bytes] = set()
        self._waiting: set[str] = set()
        """Hosts whose connection is made again soon."""
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
            heard=lambda event: self.invariants.heard(event),
            before=lambda state, effect: self.invariants.before(state, effect),
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
        self.invariants = RunInvariants(world, self.hosts, ranks, restart)
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
            self.invariants.check_members(self.state)
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
        if self.invariants.client_left_at is not None:
            return
        if self.head.up and (state := self.state) is not None:
            if not state.launch.detached and state.lease_until is not None:
                self.head.feed(ForRun(RUN, ClientCame()))
            self.world.after(3.0, self._look_in)

    def lose_client(self) -> None:
        """The client that launched ends, and does not come back."""
        if not self.head.up or self.state is None:
            self.world.after(1.0, self.lose_client)
        else:
            self.invariants.client_left_at = self.world.now
            self.head.feed(ForRun(RUN, ClientLeft()))

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
            receiver = self.agents[letter.peer]
            with self.invariants.fence(self.state, sender, receiver):
                receiver.feed(Letter(sender, letter.number, letter.run, letter.content))
            self._acknowledge(receiver, sender)

    def _acknowledge(self, receiver: SimAgent, sender: str) -> None:
        """Say which letters were taken; that is lost as letters are."""
        world, far = self.world, self.agents[sender if receiver is self.head else receiver.name]
        mail = receiver.state.mail.get(sender)
        reached = far.hears if receiver is self.head else far.heard
        if receiver.up and mail is not None and reached and not world.happens(world.faults.letter_lost):
            acknowledged = Acknowledged(receiver.name, mail.taken)
            world.after(world.within(world.faults.latency_s), partial(self.agents[sender].feed, acknowledged))

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
            self.invariants.recorded(fact)

    def _finish(self, finish: Finish) -> None:
        same = all(each == finish for each in self.finished)
        self.world.require(same, "W1", f"two ends: {self.finished} {finish}")
        self.finished.append(finish)
        if (state := self.state) is not None:
            self.invariants.check_finish(finish, state)
            for name in sorted({*state.lost, *state.spares, *state.clearing} - {self.head.name}):
                self.agents[name].lose_power()  # They are given back to their engine.
        self.world.after(0.0, partial(self.head.feed, Forgotten(RUN)))

    def check_end(self) -> Finish:
        """The run ended as it should."""
        self.invariants.check_end(self.finished[0], self.told)
        return self.finished[0]
