"""What the processes of one host say to each other, and who may say it to whom.

client, rank, zygote -> agent:  ToAgent          agent -> client: ToClient      agent -> zygote: ToZygote
agent -> warden:                ToWarden         warden -> agent: FromWarden
"""

import msgspec

from argosy.control import AnyFact, Launch
from argosy.core import ProcessId, RankId, WaitStatus
from argosy.fabric import Arrive, BoardAdd, BoardGet, BoardSet, ForkHelper


class Message(msgspec.Struct, frozen=True, tag=True):
    """One frame."""


ORPHAN = "orphan"


class Child(msgspec.Struct, frozen=True):
    """A process that a zygote or the warden started for a run: a rank, or `what` serves it.

    An `ORPHAN` is one that lost its parent, seen by the warden, which knows it by its process alone.
    """

    run: str
    rank: RankId
    process: ProcessId
    what: str = "rank"


# --- client -> agent


class LaunchRun(Message, frozen=True):
    """Start a run. Descriptors: the sealed environment, then standard input if `stdin`."""

    launch: Launch
    stdin: bool = False
    hosts: list[str] = []
    """Names of the hosts that its engine gives, spare ones last; empty: the ranks are on this one."""


class StopRun(Message, frozen=True):
    """End a run; `by` says for whom."""

    run: str
    by: str
    signal: int
    grace_s: float | None = None


class SignalRun(Message, frozen=True):
    """Send a signal to every rank of a run."""

    run: str
    signal: int


class ListRuns(Message, frozen=True):
    """Answered by `Runs`."""


class WatchRun(Message, frozen=True):
    """Send the facts of a run from now on; its `Welcome` comes first. With `lease` the run ends with the link."""

    run: str
    lease: bool = False


class TakeStacks(Message, frozen=True):
    """Answered by `Stacks`."""

    run: str
    ranks: list[int]
    native: bool = False


class GetEnvironment(Message, frozen=True):
    """Answered by `Environment`, with the sealed environment as descriptor."""

    run: str
    rank: int


class OpenTunnel(Message, frozen=True):
    """Execute `argv` in the environment of a rank on another host; empty: reach the breakpoint that it waits at.

    Pieces of streams go both ways then, until `TunnelClosed`.
    """

    run: str
    rank: int
    argv: list[str]


class TunnelData(Message, frozen=True):
    """A piece of a stream: 0 to the process, 1 and 2 from it; empty: the end of the stream."""

    stream: int
    data: bytes


class TunnelTook(Message, frozen=True):
    """The last piece of a stream was taken: the next one may come."""

    stream: int


class TunnelClosed(Message, frozen=True):
    """The process has ended, or could not be had: then with the reason."""

    code: int
    reason: str = ""


class ProvideHosts(Message, frozen=True):
    """The process that gives hosts to a run has connected; answered by `HostTickets` or `GiveHostsBack`."""

    run: str


class HostEnded(Message, frozen=True):
    """The engine says that a host is lost."""

    run: str
    host: str
    reason: str


class Shutdown(Message, frozen=True):
    """Stop every run, then agent, zygotes and warden."""

    by: str
    lost: bool = False
    """This is a host that its engine has given up: the run goes on elsewhere."""


# --- zygote -> agent


class ZygoteHello(Message, frozen=True):
    """A zygote has connected, for the first time or again; `children` are alive.

    Descriptors: the sealed environments of `runs`, which an agent may have lost.
    """

    key: str
    process: ProcessId
    children: list[Child] = []
    ready: bool = False
    runs: list[str] = []
    shared_key: str = ""


class ZygoteReady(Message, frozen=True):
    """Preloading is over. `spoiled` names entries (and why) that a fresh zygote must leave out."""

    key: str
    spoiled: list[tuple[str, str]]
    read: list[str] = []
    """Variables that the imports read."""
    shared_key: str = ""
    """The key of all launches that agree on these."""


class Forked(Message, frozen=True):
    """A child exists."""

    child: Child


class ForkFailed(Message, frozen=True):
    """No child: the reason is the host's (no memory, no pids)."""

    run: str
    rank: RankId
    reason: str


class Spared(Message, frozen=True):
    """The spares of a run, by pid: those that wait to become a rank."""

    run: str
    pids: list[int]


class ChildExited(Message, frozen=True):
    """A child is gone; its exit record is on disk."""

    child: Child
    status: WaitStatus
    max_rss_bytes: int = 0
    cpu_s: float = 0.0


class ChildPaused(Message, frozen=True):
    """A child was stopped by a signal, or continues (signal 0)."""

    child: Child
    signal: int


ToAgent = (
    LaunchRun
    | StopRun
    | SignalRun
    | ListRuns
    | WatchRun
    | TakeStacks
    | GetEnvironment
    | OpenTunnel
    | TunnelData
    | TunnelTook
    | ProvideHosts
    | HostEnded
    | Shutdown
    | ZygoteHello
    | ZygoteReady
    | Forked
    | ForkFailed
    | Spared
    | ChildExited
    | ChildPaused
    | Arrive
    | ForkHelper
    | BoardSet
    | BoardAdd
    | BoardGet
)

# --- agent -> client


class Refused(Message, frozen=True):
    """What was asked cannot be done; shown to the user as it is. `later`: ask again, what is in the way is ending."""

    reason: str
    hint: str = ""
    later: bool = False


class Welcome(Message, frozen=True):
    """The run exists; `logs` is the directory of this launch's output."""

    run: str
    directory: str
    launch: int
    logs: str
    size: int


class Happened(Message, frozen=True):
    """A fact about a run that is watched."""

    run: str
    fact: AnyFact


class Notice(Message, frozen=True):
    """A line for the user: progress of a cold start, a package that the zygote skips."""

    text: str


class RankInfo(msgspec.Struct, frozen=True):
    """One rank as `argosy ps` shows it."""

    index: int
    generation: int
    pid: int
    state: str
    steps: int = 0
    host: str = ""
    """Empty: the host of the agent that answers."""


class RunInfo(msgspec.Struct, frozen=True):
    """One living run as `argosy ps` shows it."""

    run: str
    name: str
    directory: str
    state: str
    size: int
    started_at: float
    detached: bool
    ranks: list[RankInfo]
    dims: dict[str, int] = {}
    spares: list[int] = []
    """Their pids."""
    supervised: bool = True
    """False between the death of an agent and the next one."""


class DaemonInfo(msgspec.Struct, frozen=True):
    """A warden, agent or zygote."""

    what: str
    pid: int


class Runs(Message, frozen=True):
    """The living runs and what lingers."""

    runs: list[RunInfo]
    daemons: list[DaemonInfo]


class StackText(msgspec.Struct, frozen=True):
    """The stack of one rank, or of several that are equal."""

    ranks: list[int]
    text: str
    place: str = ""


class Stacks(Message, frozen=True):
    """Grouped stacks."""

    stacks: list[StackText]
    notes: list[str] = []


class Environment(Message, frozen=True):
    """The variables of one rank, over those in the descriptor, which win over `defaults`; where it runs."""

    variables: dict[str, str]
    defaults: dict[str, str]
    cwd: str


class HostTickets(Message, frozen=True):
    """What each host needs to join, as JSON of a `Membership`; hosts reach the head at `port` of this machine."""

    engine: str
    tickets: dict[str, bytes]
    port: int


class GiveHostsBack(Message, frozen=True):
    """The run needs its hosts no more: end what is on them."""


class Done(Message, frozen=True):
    """What was asked is under way."""


ToClient = (
    Refused
    | Welcome
    | Happened
    | Notice
    | Runs
    | Stacks
    | Environment
    | HostTickets
    | GiveHostsBack
    | Done
    | TunnelData
    | TunnelTook
    | TunnelClosed
)

# --- agent -> zygote


class Preload(Message, frozen=True):
    """Import these before anything is forked; `imports` names them for the key of the launches that share them."""

    entries: list[str]
    imports: str


class RankSpec(msgspec.Struct, frozen=True):
    """What differs between the ranks of one `Fork`."""

    rank: RankId
    variables: dict[str, str]
    out: str
    err: str
    defaults: dict[str, str] = {}
    """What the run's own environment wins over."""
    page: str = ""
    stacks: str = ""
    cgroup: str = ""


class Fork(Message, frozen=True):
    """Fork ranks. Descriptors: the sealed environment, then standard input of the first rank if `stdin`."""

    launch: Launch
    run: str
    ranks: list[RankSpec]
    stdin: bool = False


class Release(Message, frozen=True):
    """A run is over: its spares are not needed any more."""

    run: str


class ForkStore(Message, frozen=True):
    """Fork a process that serves torch's store on the listener in the descriptor."""

    run: str
    generation: int
    port: int
    log: str
    address: str = "127.0.0.1"


class ForkBeside(Message, frozen=True):
    """Fork a process in a rank's group and cgroup that calls `entry`. Descriptors as for `ForkHelper`."""

    launch: Launch
    entry: str
    group: int
    cgroup: str


class Retire(Message, frozen=True):
    """End when the last child is gone."""


ToZygote = Preload | Fork | Release | ForkBeside | ForkStore | Retire

# --- agent -> warden


class Attach(Message, frozen=True):
    """I am the agent; answered by `Attached` with the shelf's descriptors."""


class Hold(Message, frozen=True):
    """Keep the descriptor on the shelf under this name, for an agent that comes after this one."""

    name: str


class Drop(Message, frozen=True):
    """Close what the shelf holds under this name."""

    name: str


class Spawn(Message, frozen=True):
    """Execute a program: a rank's, or `what` serves one, a zygote or the giver of hosts, which get no secrets.

    Descriptors as for `Fork`.
    """

    run: str
    spec: RankSpec
    argv: list[str]
    cwd: str
    umask: int
    what: str = "rank"
    stdin: bool = False


class Quit(Message, frozen=True):
    """End everything below the warden, remove its files, and go."""


ToWarden = Attach | Hold | Drop | Spawn | Quit

# --- warden -> agent


class Attached(Message, frozen=True):
    """The shelf (names in the order of the descriptors) and the children that are alive."""

    shelf: list[str]
    children: list[Child]
    pid: int


ChildReport = Forked | ForkFailed | ChildExited | ChildPaused
FromWarden = Attached | Forked | ForkFailed | ChildExited | ChildPaused

to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
to_zygote: msgspec.msgpack.Decoder[ToZygote] = msgspec.msgpack.Decoder(ToZygote)
to_warden: msgspec.msgpack.Decoder[ToWarden] = msgspec.msgpack.Decoder(ToWarden)
from_warden: msgspec.msgpack.Decoder[FromWarden] = msgspec.msgpack.Decoder(FromWarden)
