"""What one host's machine hears (`HostEvent`) and asks for (`HostEffect`)."""

import msgspec

from argosy.control.device_faults import DeviceFault
from argosy.control.messages import Order, Report
from argosy.core import ProcessId, RankId, WaitStatus

# --- events


class Ordered(msgspec.Struct, frozen=True, tag=True):
    """A run's machine sent an order."""

    run: str
    order: Order


class ZygoteSpawned(msgspec.Struct, frozen=True, tag=True):
    """A zygote's process exists."""

    key: str
    process: ProcessId


class ZygoteCame(msgspec.Struct, frozen=True, tag=True):
    """A zygote connected, for the first time or again; `ready` if it has imported everything."""

    key: str
    process: ProcessId
    ready: bool
    shared_key: str = ""
    left_out: tuple[str, ...] = ()
    """What is known to spoil zygotes of its launch."""


class ZygoteLoaded(msgspec.Struct, frozen=True, tag=True):
    """A zygote has imported its entries; `spoiled` are those, with the reason, that a fresh one must leave out."""

    key: str
    process: ProcessId
    shared_key: str = ""
    spoiled: tuple[tuple[str, str], ...] = ()


class ZygoteLost(msgspec.Struct, frozen=True, tag=True):
    """A zygote's process ended, or its connection did. `importing` is what it imported last, if that killed it."""

    key: str
    process: ProcessId
    importing: str = ""


class ZygoteRefused(msgspec.Struct, frozen=True, tag=True):
    """A zygote could not be executed."""

    key: str
    reason: str


class WardenCame(msgspec.Struct, frozen=True, tag=True):
    """The warden can be reached (again)."""


class WardenLost(msgspec.Struct, frozen=True, tag=True):
    """The warden that was to execute ranks is gone; another one takes its place."""


class ChildForked(msgspec.Struct, frozen=True, tag=True):
    """A rank's process exists."""

    run: str
    rank: RankId
    process: ProcessId


class ChildRefused(msgspec.Struct, frozen=True, tag=True):
    """A rank's process could not be made: no memory, no pids, no such program."""

    run: str
    rank: RankId
    reason: str


class ChildEnded(msgspec.Struct, frozen=True, tag=True):
    """A rank's process is gone; whoever reaped it has recorded that."""

    run: str
    rank: RankId
    status: WaitStatus
    oom: str = ""
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    device: DeviceFault | None = None


class ChildSilent(msgspec.Struct, frozen=True, tag=True):
    """A rank's process is dead, says the kernel, and nobody has reported its exit yet."""

    run: str
    rank: RankId


class TreeKilled(msgspec.Struct, frozen=True, tag=True):
    """A rank and its descendants were searched for, and killed if they existed."""

    run: str
    rank: RankId


class PageRead(msgspec.Struct, frozen=True, tag=True):
    """What a rank's progress page shows now."""

    run: str
    rank: RankId
    flags: int
    steps: int
    collectives: bool


class StoreListens(msgspec.Struct, frozen=True, tag=True):
    """The port for a store is open (or cannot be, for a reason)."""

    run: str
    generation: int
    port: int = 0
    reason: str = ""
    address: str = ""
    """Under which ranks of other hosts find it."""


class StoreForked(msgspec.Struct, frozen=True, tag=True):
    """A process serves the store of a generation."""

    run: str
    generation: int
    process: ProcessId


class StoreEnded(msgspec.Struct, frozen=True, tag=True):
    """The process that served a store, or the port that waited for one, is gone."""

    run: str
    generation: int


class EnvironmentLost(msgspec.Struct, frozen=True, tag=True):
    """The environment of a run is gone, or its directory is not there: no rank can be started. Answers `ForkRanks`."""

    run: str
    reason: str = "its environment was lost: agent, warden and zygote died together"


class QuitWanted(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants the daemons to end as soon as there is no run."""


class RunRemoved(msgspec.Struct, frozen=True, tag=True):
    """Nothing of a run is left."""

    run: str


class HostTick(msgspec.Struct, frozen=True, tag=True):
    """Time passed; asked for by `HostWakeAt`."""


class HostRecovered(msgspec.Struct, frozen=True, tag=True):
    """The agent is a new one: what was under way in the old one is lost, and with it the answers."""


HostEvent = (
    Ordered
    | ZygoteSpawned
    | ZygoteCame
    | ZygoteLoaded
    | ZygoteLost
    | ZygoteRefused
    | WardenCame
    | WardenLost
    | ChildForked
    | ChildRefused
    | ChildEnded
    | ChildSilent
    | TreeKilled
    | PageRead
    | StoreListens
    | StoreForked
    | StoreEnded
    | EnvironmentLost
    | QuitWanted
    | RunRemoved
    | HostTick
    | HostRecovered
)

# --- effects


class ToRun(msgspec.Struct, frozen=True, tag=True):
    """Send a report to a run's machine."""

    run: str
    report: Report


class SpawnZygote(msgspec.Struct, frozen=True, tag=True):
    """Execute a zygote, in the environment of a run."""

    key: str
    run: str


class ImportIn(msgspec.Struct, frozen=True, tag=True):
    """Let a zygote import entries; `imports` names them. Answered by `ZygoteLoaded`."""

    process: ProcessId
    entries: tuple[str, ...]
    imports: str


class RetireZygote(msgspec.Struct, frozen=True, tag=True):
    """Let a zygote end with its last child."""

    process: ProcessId


class RememberSpoiled(msgspec.Struct, frozen=True, tag=True):
    """Keep for later launches with these packages what spoiled a zygote, and why."""

    fingerprint: str
    spoiled: tuple[tuple[str, str], ...]


class ForkRanks(msgspec.Struct, frozen=True, tag=True):
    """Let the zygote `key` fork ranks, or if it is empty execute them. A repetition is answered, not performed."""

    key: str
    run: str
    ranks: tuple[RankId, ...]
    port: int
    view: int
    address: str = ""
    devices: dict[int, str] = {}


class SendSignal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a rank's process, at most once."""

    run: str
    rank: RankId
    signal: int


class KillTree(msgspec.Struct, frozen=True, tag=True):
    """Kill a rank and all of its descendants, also if its process is not known; answered by `TreeKilled`."""

    run: str
    rank: RankId


class AskKernel(msgspec.Struct, frozen=True, tag=True):
    """Find out how a rank ended whose exit nobody reported; answered by `ChildEnded`."""

    run: str
    rank: RankId


class ListenFor(msgspec.Struct, frozen=True, tag=True):
    """Open a port for the store of a generation, which a process serves from the first connection on.

    The process `after` served the one before, and is ended first. `port` 0: any.
    """

    run: str
    generation: int
    port: int = 0
    after: ProcessId | None = None


class RemoveRun(msgspec.Struct, frozen=True, tag=True):
    """Kill what ranks left behind, end the store and spares, remove files; answered by `RunRemoved`."""

    run: str


class TellUser(msgspec.Struct, frozen=True, tag=True):
    """A line for the user of a run."""

    run: str
    text: str


class HostWakeAt(msgspec.Struct, frozen=True, tag=True):
    """Send a `HostTick` at this time."""

    at: float


class EndDaemons(msgspec.Struct, frozen=True, tag=True):
    """Nothing was asked for as long as daemons linger: end them."""


HostEffect = (
    ToRun
    | SpawnZygote
    | ImportIn
    | RetireZygote
    | RememberSpoiled
    | ForkRanks
    | SendSignal
    | KillTree
    | AskKernel
    | ListenFor
    | RemoveRun
    | TellUser
    | HostWakeAt
    | EndDaemons
)
