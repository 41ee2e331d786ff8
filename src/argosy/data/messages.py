"""What a loader and its worker processes say to each other."""

import msgspec

CONTENT_BYTES_MAX = 1 << 16
"""A pickled batch larger than this travels in its slab, as the last place."""

# The page that a worker writes and its loader reads, as 64-bit words: a count that grows with any progress,
# the ticket that is worked on, and which of its samples.
BEATS, TICKET, SAMPLE = range(3)
IDLE = -1
PROGRESS_BYTES = 4096


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make the microbatch of these rows (int64, `width` columns)."""

    number: int
    rows: bytes
    width: int
    hint: bytes = b""
    """What the plan knows that saves the reader work, pickled."""


class Free(msgspec.Struct, frozen=True, tag=True):
    """The slab may be written again."""

    slab: int


ToWorker = Load | Free


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The microbatch is in the slab, whose descriptor comes along when it is new."""

    number: int
    slab: int
    content: bytes
    """The batch, pickled without its arrays."""
    places: list[tuple[int, int]]
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The microbatch could not be made; `error` is pickled, `trace` for people."""

    number: int
    error: bytes
    trace: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The worker is there."""


FromWorker = Started | Loaded | Failed


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Make a worker; its link and its progress page come along."""

    number: int


ToTemplate = Fork


class Born(msgspec.Struct, frozen=True, tag=True):
    """The template exists; its pidfd comes along."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The template has the source loaded."""

    seconds: float


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The source does not unpickle there."""

    trace: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The worker is process `pid`."""

    number: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The worker ended, with the status of waitpid(2)."""

    number: int
    status: int


FromTemplate = Born | Ready | Broken | Forked | Ended

to_template: msgspec.msgpack.Decoder[ToTemplate] = msgspec.msgpack.Decoder(ToTemplate)
from_template: msgspec.msgpack.Decoder[FromTemplate] = msgspec.msgpack.Decoder(FromTemplate)

to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
