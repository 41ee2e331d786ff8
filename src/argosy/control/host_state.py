"""What decisions about the processes of one host depend on."""

from typing import Literal

import msgspec

from argosy.control.launch import Launch
from argosy.core import ProcessId, RankId


class LocalRank(msgspec.Struct):
    """A rank on this host: the newest generation of its slot that was ordered."""

    rank: RankId
    port: int
    address: str = ""
    """Of the host that has the store; empty: as the launch says."""
    device: str = ""
    """The only one that it sees, if that is not the one of the launch."""
    phase: Literal["waiting", "asked", "running", "ended"] = "waiting"
    """waiting: for its zygote; asked: somebody was told to start it; running: its process exists."""
    process: ProcessId | None = None
    started_at: float = 0.0
    asked: bool = False
    """Its run has told it to stop."""
    signal: int = 0
    """To be sent as soon as the process exists."""
    doomed: bool = False
    """To be killed as soon as the process exists."""
    dead_at: float | None = None
    """Since when the kernel says that it is dead, while nobody has reported its exit."""
    noted: tuple[int, int, bool] = (0, 0, False)


class TorchStore(msgspec.Struct):
    """The store of torch that ranks of a generation find at a port, and the process that serves it, if one does."""

    generation: int
    port: int
    process: ProcessId | None = None


class LocalRun(msgspec.Struct):
    """A run as one of its hosts knows it."""

    number: int
    launch: Launch
    key: str
    """The zygote that forks its ranks; empty if they are executed."""
    ranks: dict[int, LocalRank] = {}
    view: int = 0
    """The newest that the run has told of; ranks learn it when they start."""
    listening: int | None = None
    """The generation whose store is being opened."""
    store: TorchStore | None = None
    killing: set[RankId] = set()
    """Ranks that are being killed, known or not: no rank starts before that is done."""
    held: bool = False
    """A rank waits for that."""
    failed: bool = False
    """The host can start none of its ranks any more."""
    removing: bool = False


class LocalZygote(msgspec.Struct):
    """A zygote of this host."""

    launch: Launch | None
    """The launch that it was started for; None if it came by itself, ready."""
    left_out: list[str] = []
    """What it must not import: that spoiled an earlier one."""
    phase: Literal["spawned", "importing", "ready", "returning"] = "spawned"
    """returning: an earlier agent had it, and it has not connected again yet."""
    process: ProcessId | None = None
    shared_key: str = ""
    """The key of all launches that it can serve, when it is ready."""
    tries: int = 1
    used_at: float = 0.0
    awaited_until: float = 0.0


class HostState(msgspec.Struct):
    """Everything that decisions about a host depend on. `react` changes it in place."""

    runs: dict[str, LocalRun] = {}
    zygotes: dict[str, LocalZygote] = {}
    linger_s: float = 600.0
    idle_since: float | None = None
    """None while there is a run."""
    quitting: bool = False
