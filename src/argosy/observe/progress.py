"""What a progress page says, as values. Times are CLOCK_MONOTONIC nanoseconds of the host, 0 if never."""

from enum import IntEnum, IntFlag

import msgspec

P2P_OPS = frozenset({"send", "recv"})


class Phase(IntEnum):
    """Where in its life the process is."""

    START = 0
    USER = 1
    END = 2


class Flag(IntFlag):
    """What is known of the rank beyond its counts."""

    STACKS = 1
    """The stack dump is installed: its signal may be sent."""
    TORCH_HOOKS = 2
    PROCESS_GROUP = 4
    """A torch process group was formed."""
    RUN_MANAGED = 8
    """`argosy.Run` owns the step loop."""
    SERVED = 16
    """A rank of a mesh has answered a call."""
    HOPELESS = 32
    """A replacement would fail as this rank did: none is wanted."""
    ANEW = 64
    """It ends so that another takes its place, and for no fault of the script."""


class Doing(IntEnum):
    """The outermost piece of torch that the rank is inside of."""

    NOTHING = 0
    FORWARD = 1
    BACKWARD = 2
    DATA = 3


class GroupProgress(msgspec.Struct, frozen=True):
    """How far a rank is in one process group; times in CLOCK_MONOTONIC ns, 0 if never."""

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
    """Read while it was being written: the parts may not belong together."""

    @property
    def waiting(self) -> bool:
        return self.waiting_since != 0

    def members(self) -> range | None:
        """Return the global ranks of the group, or None where the page does not know them."""
        if self.size == 1:
            return range(self.first, self.first + 1)
        return range(self.first, self.first + self.size * self.stride, self.stride) if self.stride else None


class Progress(msgspec.Struct, frozen=True):
    """What a page said at one moment; times in CLOCK_MONOTONIC ns, 0 if never."""

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
    """Steps of the run that count, by whichever process."""
    groups: tuple[GroupProgress, ...] = ()

    def has(self, flag: Flag) -> bool:
        return bool(self.flags & flag)

    @property
    def collectives(self) -> int:
        """Collectives and point-to-point operations of all groups: any change is progress."""
        return sum(group.issued + group.p2p for group in self.groups)
