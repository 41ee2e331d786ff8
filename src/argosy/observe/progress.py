"""The content of a progress page as values. Times are CLOCK_MONOTONIC nanoseconds of the host, 0 if never."""

from enum import IntEnum, IntFlag

import msgspec

P2P_OPS = frozenset({"send", "recv"})


class Phase(IntEnum):
    """How far the process is between start and exit."""

    START = 0
    USER = 1
    END = 2


class Flag(IntFlag):
    """Facts about the rank besides its counts."""

    STACKS = 1
    """The handler of the stack-dump signal is installed."""
    TORCH_HOOKS = 2
    PROCESS_GROUP = 4
    """A torch process group was formed."""
    RUN_MANAGED = 8
    """`argosy.Run` owns the step loop."""
    SERVED = 16
    """The rank has answered a call."""
    NO_REPLACEMENT = 32
    """Do not replace this rank: a replacement would fail in the same way."""
    REPLACE = 64
    """Replace this rank: it ends on purpose, and the script is not at fault."""
    BREAKPOINT = 128
    """The rank is at a breakpoint, and waits for whoever debugs it."""
    DEVICE_FAILED = 256
    """The rank's accelerator reported an error, which ends the rank."""


class Activity(IntEnum):
    """The outermost part of torch that the rank is in."""

    NOTHING = 0
    FORWARD = 1
    BACKWARD = 2
    DATA = 3


class GroupProgress(msgspec.Struct, frozen=True):
    """The progress of a rank in one process group."""

    name: str
    size: int
    issued: int = 0
    p2p: int = 0
    at: int = 0
    waiting_since: int = 0
    op: str = ""
    site: str = ""
    group_rank: int = 0
    first: int = 0
    stride: int = 0
    torn: bool = False
    """Read during a write: the fields may not belong together."""

    @property
    def waiting(self) -> bool:
        return self.waiting_since != 0

    def members(self) -> range | None:
        """Return the global ranks of the group, or None if the page does not hold them."""
        if self.size == 1:
            return range(self.first, self.first + 1)
        return range(self.first, self.first + self.size * self.stride, self.stride) if self.stride else None


class RankProgress(msgspec.Struct, frozen=True):
    """The content of a page at one moment."""

    pid: int
    flags: int = 0
    phase: int = 0
    steps: int = 0
    step_at: int = 0
    pulse: int = 0
    pulse_at: int = 0
    doing: int = 0
    crowded: int = 0
    reached: int = 0
    """Committed steps of the run, by this process or its predecessors."""
    groups: tuple[GroupProgress, ...] = ()

    def has(self, flag: Flag) -> bool:
        return bool(self.flags & flag)

    @property
    def collectives(self) -> int:
        """Issued operations of all groups, point-to-point included: any change is progress."""
        return sum(group.issued + group.p2p for group in self.groups)
