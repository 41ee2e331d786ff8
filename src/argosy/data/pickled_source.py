"""Pickle the source once for all worker processes, with its large arrays in memory that they share."""

import mmap
import os
import pickle
import struct
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from argosy.core import ConfigError

_HEADER = struct.Struct("<QQ")
_PLACE = struct.Struct("<QQ")


def pickle_shared(thing: Any) -> int:
    """Return the descriptor of a memory file with the pickled `thing`; classes of `__main__` are pickled by value.

    Raises:
        ConfigError: a part cannot be pickled; the message names it.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        content: bytes = cast(Any, cloudpickle).dumps(thing, protocol=5, buffer_callback=buffers.append)
    except Exception as error:
        raise ConfigError(
            f"the source cannot be sent to worker processes: {error}",
            hint="exclude locks, sockets and open files in __getstate__ and open them when first used, "
            "or use workers=Threads(...)",
        ) from error
    raws = [buffer.raw() for buffer in buffers]
    fd = os.memfd_create("argosy-source", os.MFD_CLOEXEC)
    start = _HEADER.size + _PLACE.size * len(raws) + len(content)
    places: list[tuple[int, int]] = []
    for raw in raws:
        start = -(-start // 64) * 64
        places.append((start, raw.nbytes))
        start += raw.nbytes
    head = _HEADER.pack(len(raws), len(content)) + b"".join(_PLACE.pack(*place) for place in places)
    _write(fd, memoryview(head + content), 0)
    for raw, (place, _) in zip(raws, places, strict=True):
        _write(fd, raw, place)
    return fd


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written


def unpickle_shared(fd: int) -> Any:
    """Return the thing; its arrays are in shared memory, which a write copies for this process alone."""
    size = os.fstat(fd).st_size
    memory = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    count, length = _HEADER.unpack_from(memory, 0)
    places = [_PLACE.unpack_from(memory, _HEADER.size + _PLACE.size * number) for number in range(count)]
    start = _HEADER.size + _PLACE.size * count
    buffers = [memory[place : place + extent] for place, extent in cast("list[tuple[int, int]]", places)]
    return pickle.loads(memory[start : start + length], buffers=buffers)
