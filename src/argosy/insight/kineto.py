"""Read a trace of torch.profiler (Kineto's JSON, also gzipped) into columns, a part at a time.

K1  Memory holds the columns and one part of the file, never all events as objects.
K2  A truncated file is read up to its last whole event, and the damage is named.
"""

import gzip
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from argosy.core import ConfigError

PART_BYTES = 4 << 20
_SEPARATORS = (b"\n  },\n  {", b"},\n{", b"}, {", b"},{")
"""Between two events, in the layouts that writers of traces use; the first that occurs."""


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0


_events = msgspec.json.Decoder(list[_Event])
_loose = msgspec.json.Decoder(list[dict[str, Any]])


@dataclass(slots=True)
class KinetoTrace:
    """Complete events as columns: times in microseconds, names and categories by number."""

    path: str
    names: list[str]
    categories: list[str]
    name: NDArray[np.int32]
    category: NDArray[np.int16]
    thread: NDArray[np.int32]
    """Number of the (process, thread) pair; on a device, of the stream."""
    begin: NDArray[np.float64]
    lasted: NDArray[np.float64]
    damage: list[str] = field(default_factory=list[str])

    def of(self, *categories: str) -> NDArray[np.bool_]:
        """Which events are of these categories."""
        return np.isin(self.category, [n for n, name in enumerate(self.categories) if name in categories])


class _Columns:
    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.parts: list[tuple[NDArray[Any], ...]] = []

    def add(self, events: list[_Event]) -> None:
        chosen = [event for event in events if event.ph == "X"]
        if not chosen:
            return
        names, categories, threads = self.names, self.categories, self.threads
        self.parts.append(
            (
                np.array([names.setdefault(each.name, len(names)) for each in chosen], np.int32),
                np.array([categories.setdefault(each.cat, len(categories)) for each in chosen], np.int16),
                np.array([threads.setdefault((each.pid, each.tid), len(threads)) for each in chosen], np.int32),
                np.array([each.ts for each in chosen], np.float64),
                np.array([each.dur for each in chosen], np.float64),
            )
        )


def read_trace(path: Path) -> KinetoTrace:
    """Read a trace.

    Raises:
        ConfigError: it is no trace.
        OSError: it cannot be read.
    """
    columns, damage = _Columns(), list[str]()
    for part in _parts(path, damage):
        columns.add(part)
    if not columns.parts:
        raise ConfigError(
            f"not a trace of torch.profiler: {path}", hint="give the JSON file that export_chrome_trace wrote"
        )
    name, category, thread, begin, lasted = (np.concatenate(column) for column in zip(*columns.parts, strict=True))
    order = np.argsort(begin, kind="stable")
    return KinetoTrace(
        str(path),
        list(columns.names),
        list(columns.categories),
        name[order],
        category[order],
        thread[order],
        begin[order],
        lasted[order],
        damage,
    )


def _parts(path: Path, damage: list[str]) -> Iterator[list[_Event]]:
    if path.name.endswith(".gz"):
        yield from _split(gzip.decompress(path.read_bytes()), damage)
        return
    with open(path, "rb") as file:
        if not path.stat().st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield from _split(data, damage)


def _split(data: "bytes | mmap.mmap", damage: list[str]) -> Iterator[list[_Event]]:
    key = data.find(b'"traceEvents"')
    start = data.find(b"[", key if key >= 0 else 0)
    if start < 0 or (key < 0 and data[:64].lstrip()[:1] != b"["):
        return
    at = start + 1
    head = data[at : at + (1 << 20)]
    separator = next((each for each in _SEPARATORS if each in head), b"},{")
    closing = separator.index(b"}") + 1
    opening = len(separator) - 1 - closing
    while at < len(data):
        cut = data.find(separator, at + PART_BYTES)
        if cut < 0:
            yield from _last(data[at:], separator, damage)
            return
        yield _decode(b"[" + data[at : cut + closing] + b"]", damage)
        at = cut + closing + opening
        if data[at : at + 1] == b",":
            at += 1


def _last(data: bytes, separator: bytes, damage: list[str]) -> Iterator[list[_Event]]:
    """The rest of the array: it ends with a bracket, or the file was cut off."""
    end = data.rfind(b"]")
    while end >= 0:
        try:
            yield _events.decode(b"[" + data[:end].rstrip().rstrip(b",") + b"]")
            return
        except msgspec.MsgspecError:
            end = data.rfind(b"]", 0, end) if len(data) - end < 4096 else -1
    cut = data.rfind(separator)
    damage.append(f"the trace is cut off: the last {len(data) - max(cut, 0)} bytes are not whole events")
    if cut >= 0:
        yield _decode(b"[" + data[: cut + separator.index(b"}") + 1] + b"]", damage)


def _decode(part: bytes, damage: list[str]) -> list[_Event]:
    try:
        return _events.decode(part)
    except msgspec.MsgspecError:
        pass
    try:  # An event with a field of another kind than usual: those that fit are taken.
        found: list[_Event] = []
        for each in _loose.decode(part):
            if each.get("ph") == "X":
                wanted = {name: each[name] for name in ("ph", "cat", "name", "pid", "tid", "ts", "dur") if name in each}
                found.append(msgspec.convert(wanted, _Event, strict=False))
        return found
    except msgspec.MsgspecError as error:
        damage.append(f"{len(part)} bytes of events cannot be read: {error}")
        return []
