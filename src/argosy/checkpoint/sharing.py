"""Ranks of one host read each stored byte once: whoever reads a chunk puts it into the memory of all who need it.

H1  What a rank needs is what its table says: boxes and where they lie. All who share decide from the same tables, so
    each chunk has exactly one reader.
H2  Nobody uses what others wrote into its memory before all have said that they are through.
H3  Who leaves before that closes its gate, and waits until nobody is writing who saw it open.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from argosy._select import native
from argosy.checkpoint.format import Entry, digest
from argosy.checkpoint.reading import Chunk
from argosy.fabric import host_id
from argosy.transfer import CHUNK_BYTES, DTYPES, Box, Copy, Member, held, spot, strides_of

RUN_BYTES, RUNS = 512, 4
"""Boxes in more and shorter runs are written into another process more slowly than that one reads them itself."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
OPEN, CLOSED, WORD = 1, 2, 8
LEAVE_S, LOOK_S = 5.0, 0.001
"""Who leaves waits so long for a write that was begun: it takes milliseconds, unless the writer is stopped in it."""
_PR_SET_PTRACER = 0x59616D61
Exchange = Callable[[str], list[str]]
"""Tell all ranks something, and hear what each of them says."""


class Place(NamedTuple):
    """A box of a stored tensor, and where it goes: the address of its first cell, strides in cells."""

    box: Box
    address: int
    strides: tuple[int, ...]


Table = dict[str, list[Place]]
Receivers = dict[tuple[str, int], list[int]]
"""Other ranks that need a chunk, by its file and offset."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says that would share: its process, what it reads, and where its table is."""

    host: str
    reads: str
    pid: int
    words: int
    """The address of two words: its gate, and how many of its threads write into others."""
    address: int
    bytes: int


def places(targets: Mapping[str, Member], rank: int, addresses: Mapping[str, int]) -> Table:
    """Where the cells of each tensor go that this rank needs; without those in short runs."""
    found: Table = {}
    for name, member in targets.items():
        size, pieces = member.itemsize, held(member, rank)
        if all(_is_quick(piece.box, run_of(piece.box, piece.strides, member.shape), size) for piece in pieces):
            found[name] = [Place(piece.box, addresses[name] + piece.offset * size, piece.strides) for piece in pieces]
    return found


def _is_quick(box: Box, run: int, size: int) -> bool:
    return run * size >= RUN_BYTES or box.cells <= RUNS * run


def run_of(box: Box, strides: Sequence[int], shape: Sequence[int]) -> int:
    """How many cells of a box follow each other both in its tensor and where they go."""
    cells = 1
    for size, stride, whole in zip(reversed(box.shape), reversed(strides), reversed(shape), strict=True):
        if stride != cells and size > 1:
            break
        cells *= size
        if size != whole:
            break
    return cells


def reads_of(place: str, entries: Sequence[Entry]) -> str:
    """A digest of which stored boxes have which names here: ranks that rename differently do not share."""
    return digest("\n".join([place, *(f"{each.file} {each.offset} {each.name}" for each in entries)]).encode())


def groups(offers: Sequence[Offer | None]) -> dict[int, list[int]]:
    """Who shares with whom, each rank itself included; ranks that are alone are not there."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, offer in enumerate(offers):
        if offer is not None:
            alike.setdefault((offer.host, offer.reads), []).append(rank)
    return {rank: ranks for ranks in alike.values() if len(ranks) > 1 for rank in ranks}


def divided(wanted: Sequence[Chunk], rank: int, tables: Mapping[int, Table]) -> tuple[list[Chunk], Receivers]:
    """The chunks of `wanted` that this rank reads, and for whom else; `tables` are those of all who share."""
    mine: list[Chunk] = []
    receivers: Receivers = {}
    for chunk in wanted:
        entry, box, offset, _ = chunk
        needing = [
            other
            for other, table in tables.items()
            if any(place.box & box is not None for place in table.get(entry.name, ()))
        ]
        if rank not in needing:
            mine.append(chunk)  # It was not offered: only this rank puts it where it belongs.
        # Neighbours in a file go to the same reader, in reads as large as without others.
        elif needing[offset // CHUNK_BYTES % len(needing)] == rank:
            mine.append(chunk)
            receivers[entry.file, offset] = [other for other in needing if other != rank]
    return mine, receivers


def copies_to(entry: Entry, box: Box, at: int, table: Table) -> Iterator[Copy]:
    """The copies from a chunk at an address to the places of a table."""
    size = DTYPES[entry.dtype]
    for place in table[entry.name]:
        common = place.box & box
        if common is None:
            continue
        inside = [a - b for a, b in zip(common.start, box.start, strict=True)]
        there = [a - b for a, b in zip(common.start, place.box.start, strict=True)]
        source = spot(at, size, strides_of(box.shape), inside)
        yield Copy(common, entry.shape, size, source, spot(place.address, size, place.strides, there))


class Partner(NamedTuple):
    """Another rank that shares the reading."""

    pid: int
    pidfd: int
    words: int
    """As in its offer."""
    table: Table
    way: tuple[int, int, int, int]
    """How `write_memory` goes to it."""


class Sharing:
    """The ranks of this host that share the reading of a step with this one; nobody before they agree."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.partners: dict[int, Partner] = {}
        self.is_any = False
        """Whether some ranks share, be it others: all know it."""
        self._table: Table = {}
        self._data = b""
        self._words = (ctypes.c_uint64 * 2)(OPEN, 0)
        self._is_open = False

    def agree(self, exchange: Exchange, reads: str, table: Table | None) -> None:
        """Find the others who read the same; all ranks call it, those that cannot share without a table."""
        offer = None if table is None or sys.platform != "linux" else self._offer(reads, table)
        answers = exchange(msgspec.json.encode(offer).decode())
        offers = [msgspec.json.decode(answer, type=Offer | None) for answer in answers]
        grouped = groups(offers)
        if not grouped:
            return
        self.is_any = True
        group = grouped.get(self.rank, [])
        is_reached = True
        try:
            for each in group:
                other = offers[each]
                if each != self.rank and other is not None:
                    self.partners[each] = self._partner(other)
        except (OSError, msgspec.MsgspecError):  # Not permitted: each reads for itself.
            is_reached = False
        reached = exchange("yes" if is_reached else "no")
        if not all(reached[each] == "yes" for each in group):
            self._forget()

    def divided(self, wanted: Sequence[Chunk]) -> tuple[Sequence[Chunk], Receivers]:
        """The chunks that this rank reads, and for whom else."""
        if not self.partners:
            return wanted, {}
        tables = {rank: partner.table for rank, partner in self.partners.items()} | {self.rank: self._table}
        return divided(wanted, self.rank, dict(sorted(tables.items())))

    def _offer(self, reads: str, table: Table) -> Offer:
        self._table, self._data = table, msgspec.json.encode(table)
        self._is_open = _let_others_write(True)
        address = ctypes.cast(ctypes.c_char_p(self._data), ctypes.c_void_p).value or 0
        return Offer(host_id(), reads, os.getpid(), ctypes.addressof(self._words), address, len(self._data))

    def _partner(self, offer: Offer) -> Partner:
        pidfd = os.pidfd_open(offer.pid)
        try:
            table = msgspec.json.decode(native.read_memory(offer.pid, offer.address, offer.bytes), type=Table)
        except BaseException:
            os.close(pidfd)
            raise
        way = offer.pid, pidfd, offer.words, ctypes.addressof(self._words) + WORD
        return Partner(offer.pid, pidfd, offer.words, table, way)

    def _forget(self) -> None:
        for partner in self.partners.values():
            os.close(partner.pidfd)
        self.partners = {}

    def leave(self) -> None:
        """Go, whether or not the others are through (H3)."""
        if not self.partners:
            return
        self._words[0] = CLOSED
        _left.append(self._words)  # Others may look at it much later.
        deadline = time.monotonic() + LEAVE_S
        for partner in self.partners.values():
            while self._is_writing(partner) and time.monotonic() < deadline:
                time.sleep(LOOK_S)

    def _is_writing(self, partner: Partner) -> bool:
        try:
            return any(native.read_memory(partner.pid, partner.words + WORD, WORD))
        except OSError:  # It has ended.
            return False

    def close(self) -> None:
        self._forget()
        if self._is_open:
            self._is_open = _let_others_write(False)


_left: list[Any] = []


def _let_others_write(allowed: bool) -> bool:
    """Where only ancestors may reach into a process, let others of this user do so; returns whether they may now."""
    try:
        is_closed = YAMA.read_text().strip() == "1"
    except OSError:
        is_closed = False
    if is_closed:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1 if allowed else 0), 0, 0, 0)
    return is_closed and allowed
