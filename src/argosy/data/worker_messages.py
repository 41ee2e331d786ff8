"""The messages between a loader, the template process and the worker processes."""

import msgspec

CONTENT_BYTES_MAX = 1 << 16
"""A larger pickle travels in its slab, as the last place."""

BEATS, REQUEST, SAMPLE = range(3)
"""Words of the page that a worker writes and its loader reads: a count that grows with any progress, the number of
the `Load` in progress, and the number of its sample in progress."""
IDLE = -1
PROGRESS_BYTES = 4096


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make the microbatch of these rows (int64, `width` columns)."""

    number: int
    rows: bytes
    width: int
    hint: bytes = b""
    """The plan's hint for `SampleReader.prepare`, pickled."""


class FreeSlab(msgspec.Struct, frozen=True, tag=True):
    """The slab may be reused."""

    slab: int


ToWorker = Load | FreeSlab


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The microbatch is in the slab; a new slab's descriptor is attached."""

    number: int
    slab: int
    content: bytes
    """The batch, pickled without its arrays."""
    places: list[tuple[int, int]]
    """Offset and size of each array in the slab."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The microbatch could not be made; `error` is pickled, `trace` is text."""

    number: int
    error: bytes
    trace: str


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    """The worker runs."""


FromWorker = WorkerStarted | Loaded | LoadFailed


class ForkWorker(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker; its link and its progress page are attached."""

    number: int


ToTemplate = ForkWorker


class TemplateStarted(msgspec.Struct, frozen=True, tag=True):
    """The template process runs; its pidfd is attached."""


class TemplateReady(msgspec.Struct, frozen=True, tag=True):
    """The template process has loaded the source."""


class SourceBroken(msgspec.Struct, frozen=True, tag=True):
    """The template process cannot unpickle the source."""

    trace: str


class WorkerForked(msgspec.Struct, frozen=True, tag=True):
    """The worker is process `pid`."""

    number: int
    pid: int


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """The worker ended with this status of waitpid(2)."""

    number: int
    status: int


FromTemplate = TemplateStarted | TemplateReady | SourceBroken | WorkerForked | WorkerEnded

to_template: msgspec.msgpack.Decoder[ToTemplate] = msgspec.msgpack.Decoder(ToTemplate)
from_template: msgspec.msgpack.Decoder[FromTemplate] = msgspec.msgpack.Decoder(FromTemplate)

to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
