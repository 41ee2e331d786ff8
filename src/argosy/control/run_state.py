"""What decisions about one run depend on, with the counters that make an event about one rank cost O(1)."""

import msgspec

from argosy.control.device_faults import Devices
from argosy.control.launch import Launch
from argosy.control.restart import Budget
from argosy.core import RankId, WaitStatus, format_ranks
from argosy.observe import Flag

MANAGED, GROUPED = int(Flag.RUN_MANAGED), int(Flag.PROCESS_GROUP)
NO_REPLACEMENT, SERVED, REPLACE = int(Flag.NO_REPLACEMENT), int(Flag.SERVED), int(Flag.REPLACE)
DEVICE_FAILED = int(Flag.DEVICE_FAILED)


class Slot(msgspec.Struct):
    """One place of the run, through its generations."""

    host: str
    generation: int = 0
    pid: int = 0
    """0 unless its process is known to be alive."""
    starting: bool = False
    """Its process was asked for and nobody has said yet that it exists."""
    asked: bool = False
    """Argosy told this generation to stop."""
    status: WaitStatus | None = None
    takedown: int = 0
    """The number of the takedown that this slot is part of, or 0."""
    flags: int = 0
    """Those of `observe.Flag`, as a plain number: asked for at every event."""
    steps: int = 0
    collectives: bool = False

    @property
    def alive(self) -> bool:
        return self.pid != 0 or self.starting

    @property
    def moved(self) -> bool:
        """Whether the rank did what it is there for."""
        if self.flags & MANAGED:
            return self.steps > 0
        return bool(self.steps or self.collectives or self.flags & SERVED)


class Takedown(msgspec.Struct):
    """A set of ranks that is being stopped: to be replaced, or for good when `final`."""

    ranks: set[int]
    cause: str
    final: bool = False
    code: int = 0
    start_at: float = 0.0
    signal: int = 15
    grace_s: float | None = None
    """None: the run's own."""
    number: int = 0
    alive: set[int] = set()
    evidence: RankId | None = None
    """The rank whose failure is being looked into; nobody is stopped meanwhile."""
    evidence_until: float = 0.0
    kill_at: float | None = None


class RunState(msgspec.Struct, kw_only=True):
    """Everything that decisions about a run depend on. `react` changes it in place."""

    number: int
    """Counts the launches of the run's directory."""
    launch: Launch
    started_at: float
    slots: list[Slot]
    hosts: list[str]
    """Those that have ranks, and the head's own."""
    spares: list[str] = []
    """Hosts that can take the place of one that is lost."""
    lost: list[str] = []
    """Hosts that are not in the run any more; what they say changes nothing."""
    view: int = 0
    """Numbers the memberships of the run: it grows whenever ranks are started."""
    began: bool = False
    ended: bool = False
    alive: int = 0
    opening: set[int] = set()
    """Slots that are started as soon as their store listens."""
    port: int = 0
    address: str = ""
    """Of the host that has the store."""
    store_generation: int = -1
    takedowns: dict[int, Takedown] = {}
    takedowns_made: int = 0
    final: int = 0
    """The number of the takedown that ends the run, or 0."""
    budget: Budget = Budget()
    devices: Devices = msgspec.field(default_factory=Devices)
    owed: dict[int, tuple[RankId, str]] = {}
    """Evidence that is being taken, by the index of the rank that failed: its rank and the cause."""
    lease_until: float | None = None
    """When the run is stopped unless its client comes back; None while there is a client, or none is needed."""
    clearing: set[str] = set()
    """Hosts that have not cleared up yet."""
    outcome: tuple[int, str, float] | None = None
    """Exit code, reason, and the time until which hosts may clear up, once every rank is gone."""
    managed: int = 0
    grouped: int = 0
    hopeless: int = 0
    """How many slots show these flags."""
    moved: dict[int, int] = {}
    """How many slots of a generation have moved."""

    def rank(self, index: int) -> RankId:
        return RankId("main", index, self.slots[index].generation)

    def is_member(self, rank: RankId) -> bool:
        """Whether a rank is in the current view: of its slot's generations the one that lives or is being started."""
        slot = self.slots[rank.index] if 0 <= rank.index < len(self.slots) else None
        return slot is not None and slot.generation == rank.generation and slot.alive

    def note(self, slot: Slot, flags: int, steps: int, collectives: bool) -> None:
        """Take in what a rank's page shows, and keep the counters."""
        self._count(slot, -1)
        slot.flags, slot.steps, slot.collectives = flags, steps, collectives
        self._count(slot, 1)

    def _count(self, slot: Slot, sign: int) -> None:
        flags = slot.flags
        if flags & MANAGED:
            self.managed += sign
        if flags & GROUPED:
            self.grouped += sign
        if flags & NO_REPLACEMENT:
            self.hopeless += sign
        if slot.moved:
            self.moved[slot.generation] = self.moved.get(slot.generation, 0) + sign

    def renew(self, index: int, generation: int) -> None:
        """Give a slot whose process is gone its next generation, which is about to start."""
        slot = self.slots[index]
        self.note(slot, 0, 0, False)
        slot.generation, slot.starting, slot.asked, slot.status, slot.takedown = generation, True, False, None, 0
        self.alive += 1

    def leave(self, index: int, status: WaitStatus | None) -> None:
        """A slot's process is gone, or never came into being."""
        slot = self.slots[index]
        slot.pid, slot.starting, slot.status = 0, False, status
        self.alive -= 1
        if slot.takedown:
            self.takedowns[slot.takedown].alive.discard(index)


def describe(state: RunState) -> str:
    """One word or two for `argosy ps`."""
    if state.ended:
        return "ending"
    if not state.began:
        return "starting"
    if state.final or state.outcome is not None:
        return "stopping"
    if state.takedowns:
        return f"restarting {format_ranks([index for down in state.takedowns.values() for index in down.ranks])}"
    return "running"
