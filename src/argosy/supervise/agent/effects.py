"""What a root asks its agent to do. Values; the agent performs them, the tests' machine pretends to."""

import msgspec

from argosy.control import AnyFact
from argosy.core import RankId


class OpenStore(msgspec.Struct, frozen=True):
    """Serve a new, empty store for the ranks of `generation`, if none does; the one before ends."""

    generation: int


class Start(msgspec.Struct, frozen=True):
    """Start these ranks' processes. `again`: an earlier agent may have started some; those are used or killed."""

    ranks: tuple[RankId, ...]
    again: bool = False


class Signal(msgspec.Struct, frozen=True):
    """Send a signal to these ranks' processes."""

    ranks: tuple[RankId, ...]
    signal: int


class Kill(msgspec.Struct, frozen=True):
    """End these ranks and all of their descendants at once."""

    ranks: tuple[RankId, ...]


class TakeEvidence(msgspec.Struct, frozen=True):
    """Write an incident about the failure of `first`; answered by `EvidenceTaken`."""

    first: RankId
    cause: str


class Record(msgspec.Struct, frozen=True):
    """Append a fact to the run's journal and tell who listens."""

    fact: AnyFact


class WakeAt(msgspec.Struct, frozen=True):
    """Send a `Tick` at this time, if no other event comes first."""

    at: float


class Finish(msgspec.Struct, frozen=True):
    """The run is over."""

    code: int
    reason: str


Effect = OpenStore | Start | Signal | Kill | TakeEvidence | Record | WakeAt | Finish
