"""What one run's machine hears (`RunEvent`) and asks for (`RunEffect`)."""

import msgspec

from argosy.control import facts
from argosy.control.messages import Order, Report
from argosy.core import RankId

# --- events


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Start the run."""


class FromHost(msgspec.Struct, frozen=True, tag=True):
    """A host reports."""

    host: str
    report: Report


class StopWanted(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants the run to end; the second time it is killed."""

    by: str
    signal: int
    grace_s: float | None = None


class ClientCame(msgspec.Struct, frozen=True, tag=True):
    """The client whose run ends with it is there."""


class ClientLeft(msgspec.Struct, frozen=True, tag=True):
    """The client whose run ends with it is gone."""


class Hung(msgspec.Struct, frozen=True, tag=True):
    """Rank `index` holds the run up for longer than is tolerated; evidence was taken."""

    index: int
    summary: str


class HostSilent(msgspec.Struct, frozen=True, tag=True):
    """A host has not been heard of for longer than usual. It may come back; only its engine knows that it is lost."""

    host: str


class HostGone(msgspec.Struct, frozen=True, tag=True):
    """The engine that gave a host says that it is lost, or the host itself that it cannot serve."""

    host: str
    reason: str
    joined: bool = True
    """False: it never served the run, so none of its ranks can exist."""


class EvidenceTaken(msgspec.Struct, frozen=True, tag=True):
    """The incident about the failure of `rank` is on disk, or could not be taken."""

    rank: RankId


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time passed; asked for by `WakeAt`."""


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """The agent is a new one: what was under way in the old one is lost, with its answers and its clients."""


RunEvent = (
    Begin
    | FromHost
    | StopWanted
    | ClientCame
    | ClientLeft
    | Hung
    | HostSilent
    | HostGone
    | EvidenceTaken
    | Tick
    | Recovered
)


# --- effects


class ToHost(msgspec.Struct, frozen=True, tag=True):
    """Send an order to a host."""

    host: str
    order: Order


class TakeEvidence(msgspec.Struct, frozen=True, tag=True):
    """Write an incident about the failure of `first`; answered by `EvidenceTaken`."""

    first: RankId
    cause: str


class Record(msgspec.Struct, frozen=True, tag=True):
    """Append a fact to the run's journal and tell who listens."""

    fact: facts.AnyFact


class WakeAt(msgspec.Struct, frozen=True, tag=True):
    """Send a `Tick` at this time."""

    at: float


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""

    code: int
    reason: str


RunEffect = ToHost | TakeEvidence | Record | WakeAt | Finish
