"""What a run's machine and the machines of its hosts say to each other, on one host or many.

A run sends `Order`s to a host, a host answers with `Report`s. `node.py` delivers them, once and in order.
"""

import msgspec

from argosy.control.device_faults import DeviceFault
from argosy.control.launch import Launch
from argosy.core import RankId, WaitStatus

# --- a run to a host


class AcceptRun(msgspec.Struct, frozen=True, tag=True):
    """The run will have ranks on the host; `number` counts the launches of its directory."""

    number: int
    launch: Launch
    warm: bool = False
    """The host is spare: a zygote is to be ready when it is needed."""


class OpenStore(msgspec.Struct, frozen=True, tag=True):
    """Serve a new, empty store for the ranks of `generation`; the one before ends. Answered by `StoreOpened`."""

    generation: int


class StartRanks(msgspec.Struct, frozen=True, tag=True):
    """The membership is `view` now. Start these ranks, which may be none; they find their store at `port`."""

    view: int
    ranks: tuple[RankId, ...]
    port: int
    address: str = ""
    """Of the store's host; empty: as the launch says."""
    devices: dict[int, str] = {}
    """The devices of the ranks, by index, that have another one than the launch says."""


class SignalRanks(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to these ranks, at most once."""

    ranks: tuple[RankId, ...]
    signal: int


class KillRanks(msgspec.Struct, frozen=True, tag=True):
    """Kill these ranks and all of their descendants."""

    ranks: tuple[RankId, ...]


class ClearRun(msgspec.Struct, frozen=True, tag=True):
    """The run is over: leave nothing of it on the host. Answered by `Cleared`."""


Order = AcceptRun | OpenStore | StartRanks | SignalRanks | KillRanks | ClearRun

# --- a host to a run


class StoreOpened(msgspec.Struct, frozen=True, tag=True):
    """The store of a generation listens."""

    generation: int
    port: int
    address: str = ""


class StoreFailed(msgspec.Struct, frozen=True, tag=True):
    """The store cannot listen."""

    generation: int
    reason: str


class HostFailed(msgspec.Struct, frozen=True, tag=True):
    """The host can start no rank of this run any more."""

    reason: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """A rank's process exists."""

    rank: RankId
    pid: int


class Noted(msgspec.Struct, frozen=True, tag=True):
    """What a rank's progress page shows, as far as decisions depend on it; sent when it changes."""

    rank: RankId
    flags: int
    """Those of `observe.Flag`."""
    steps: int
    """At most 2: more make no difference."""
    collectives: bool


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank's process is gone. What was seen of it on its host, for the run to judge."""

    rank: RankId
    status: WaitStatus
    lived_s: float = 0.0
    oom: str = ""
    """Why it is taken to have run out of memory; empty if it did not."""
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    device: DeviceFault | None = None
    """What the kernel's log says of the rank's device."""


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing of the run is left on the host."""


Report = StoreOpened | StoreFailed | HostFailed | Started | Noted | Exited | Cleared
