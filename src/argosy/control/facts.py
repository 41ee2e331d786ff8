"""What happened to a run, in the past tense: the records of its `events` journal.

Times are seconds since the epoch. One writer: the agent. Readers skip tags that they do not know.
"""

import msgspec

from argosy.core import RankId, WaitStatus, format_ranks


class Fact(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One thing that happened at a time."""

    at: float


class LaunchStarted(Fact, frozen=True, kw_only=True):
    """One `argosy run` of the run began."""

    launch: int
    argv: list[str]
    size: int
    host: str


class RankStarted(Fact, frozen=True, kw_only=True):
    """A rank's process exists."""

    rank: RankId
    pid: int


class RankExited(Fact, frozen=True, kw_only=True):
    """A rank's process ended. `asked` if Argosy had told it to stop; `oom` says how that is known."""

    rank: RankId
    pid: int
    status: WaitStatus
    asked: bool = False
    oom: str = ""
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    device: str = ""
    """That its device failed, and how."""


class RankPaused(Fact, frozen=True, kw_only=True):
    """A rank was stopped by a signal (SIGSTOP and its kin) or went on (`resumed`)."""

    rank: RankId
    signal: int
    resumed: bool = False


class HostLost(Fact, frozen=True, kw_only=True):
    """A host is silent or lost. Its `ranks` are replaced on the host `spare`; if that is empty, there is none."""

    host: str
    reason: str
    ranks: list[int]
    spare: str = ""

    @property
    def text(self) -> str:
        """One line."""
        if not self.ranks:
            return f"host {self.host} lost: {self.reason}"
        which = f"rank{'s' * (len(self.ranks) > 1)} {format_ranks(self.ranks)}"
        where = f"to be replaced on {self.spare}" if self.spare else "with no spare host to replace them"
        return f"host {self.host} lost: {self.reason}; it had {which}, {where}"


class DeviceExcluded(Fact, frozen=True, kw_only=True):
    """A device is not used again in this launch. The rank that had it gets the device `spare`."""

    rank: int
    host: str
    device: str
    spare: str
    reason: str

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.reason} ({self.host}); rank {self.rank} continues on device {self.spare}"


class Restarting(Fact, frozen=True, kw_only=True):
    """Ranks are being replaced because `failed` did; `ranks` are indices, `generation` the new one."""

    ranks: list[int]
    generation: int
    cause: str
    failed: RankId | None = None
    note: str = ""
    """Why more ranks are replaced than the policy says."""
    delay_s: float = 0.0


class GaveUp(Fact, frozen=True, kw_only=True):
    """The restart policy allows no more; the run ends with the first failure."""

    reason: str
    failed: RankId | None = None


class HangSeen(Fact, frozen=True, kw_only=True):
    """Progress stopped; `summary` is one line, `incident` the directory with the evidence."""

    summary: str
    incident: str = ""


class HangEnded(Fact, frozen=True, kw_only=True):
    """The ranks that hung move again, after `lasted_s`."""

    incident: str
    lasted_s: float


class IncidentTaken(Fact, frozen=True, kw_only=True):
    """Evidence was written to `incidents/<incident>/`.

    `failed` is the rank whose failure was seen first. The evidence may show that it failed because of rank `first`.
    """

    incident: str
    headline: str
    failed: RankId | None = None
    first: RankId | None = None


class StopAsked(Fact, frozen=True, kw_only=True):
    """Somebody told the run to end: `by` is `ctrl-c`, `argosy stop`, `client gone`, ..."""

    by: str
    signal: int


class DiskTrouble(Fact, frozen=True, kw_only=True):
    """A disk does not take what is written: output, facts, or what a restarted agent would have to know."""

    what: str


class LaunchEnded(Fact, frozen=True, kw_only=True):
    """The launch is over; `code` is what `argosy run` exits with."""

    launch: int
    code: int
    reason: str


AnyFact = (
    LaunchStarted
    | RankStarted
    | RankExited
    | RankPaused
    | HostLost
    | DeviceExcluded
    | Restarting
    | GaveUp
    | HangSeen
    | HangEnded
    | IncidentTaken
    | StopAsked
    | DiskTrouble
    | LaunchEnded
)
