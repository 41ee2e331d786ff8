"""Read chunks of a step, each verified as it is copied: in native code from files and memory, else piece by piece.

R5  Chunks that lie side by side are read together; memory for reading does not grow with the state.
"""

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy._select import native
from argosy.checkpoint.files import Files, aligned
from argosy.checkpoint.format import BLOCK, CorruptShard, Entry
from argosy.checkpoint.reading import Chunk
from argosy.transfer import CHUNK_BYTES, DTYPES, Box, Copy, Spot, rows_of, spot, strides_of

READERS = 4
BATCH = 2048
"""Reads that are planned at a time."""
GAP_BYTES = 64 << 10
Sink = Callable[[Entry, Box, int], Iterable[Copy]]
"""Given a chunk that lies at an address: the copies to be made of it."""
Rows = NDArray[np.int64]
SOURCE, DESTINATION = 0, 1


class Group(NamedTuple):
    """Chunks that are read together: `start` and `end` are whole blocks of a file, `last` is behind what is needed."""

    file: str
    start: int
    end: int
    last: int
    chunks: list[Chunk]


def size_of(entry: Entry, box: Box) -> int:
    return box.cells * DTYPES[entry.dtype]


def grouped(wanted: Sequence[Chunk]) -> Iterator[Group]:
    """Put chunks together that lie side by side, up to 8 MiB; in the order of their files."""
    ordered = sorted(wanted, key=lambda chunk: (chunk[0].file, chunk[2]))
    group: Group | None = None
    for chunk in ordered:
        entry, box, offset, _ = chunk
        last = offset + size_of(entry, box)
        start, end = offset // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK
        if group is not None:
            near = group.file == entry.file and start <= group.end + GAP_BYTES
            if near and max(end, group.end) - group.start <= CHUNK_BYTES:
                group.chunks.append(chunk)
                group = Group(group.file, group.start, max(end, group.end), max(last, group.last), group.chunks)
                continue
            yield group
        group = Group(entry.file, start, end, last, [chunk])
    if group is not None:
        yield group


class Batch:
    """Reads with the copies that follow each of them, as tables for native code. Sources are counted from each read."""

    def __init__(self, groups: Sequence[Group], sink: Sink | None) -> None:
        self.groups = groups
        self.chunks = [chunk for group in groups for chunk in group.chunks]
        rows: list[tuple[int, ...]] = []
        summed: list[bool] = []
        """Whether the sums of a row are part of its chunk's: else it copies what another row sums."""
        starts: list[int] = []
        ends: list[int] = []
        for group in groups:
            for chunk in group.chunks:
                starts.append(len(rows))
                made, together = _made(chunk, chunk[2] - group.start, sink)
                for number, copy in enumerate(made):
                    rows += rows_of(copy)
                    summed += [together or not number] * (len(rows) - len(summed))
            ends.append(len(rows))
        self._rows: Rows = np.array(rows, "<i8").reshape(-1, 16)
        self._summed = np.array(summed, bool)
        self._starts, self._ends = np.array(starts, np.int64), np.array([0, *ends], np.int64)
        sums = bytes.fromhex("".join(chunk[3] for chunk in self.chunks))
        self._expected = np.frombuffer(sums, ">u8").reshape(-1, 2).astype(np.uint64)

    def verify(self, files: Files) -> None:
        """Read and sum; nothing is written."""
        rows = self._rows[self._summed]
        rows[:, DESTINATION] = 0
        places = np.concatenate([[0], np.cumsum(self._summed)])
        self._check(_performed(files, self.groups, rows, places[self._ends]), places[self._starts])

    def fill(self, files: Files) -> None:
        """Read, copy and sum in one pass."""
        sums = _performed(files, self.groups, self._rows, self._ends)
        places = np.concatenate([[0], np.cumsum(self._summed)])
        self._check(sums[self._summed], places[self._starts])

    def _check(self, sums: NDArray[np.uint64], starts: Rows) -> None:
        found = np.add.reduceat(sums, starts, axis=0, dtype=np.uint64)
        wrong = np.flatnonzero((found != self._expected).any(axis=1))
        if len(wrong):
            entry, box, _, expected = self.chunks[int(wrong[0])]
            actual = "".join(f"{int(word):016x}" for word in found[wrong[0]])
            raise CorruptShard(entry.file, f"{entry.name}{box}", expected, actual)


def _made(chunk: Chunk, at: int, sink: Sink | None) -> tuple[list[Copy], bool]:
    """The copies for a chunk at an address, and whether their sums together are the chunk's."""
    entry, box, _, _ = chunk
    size, strides = DTYPES[entry.dtype], strides_of(box.shape)
    made = list(sink(entry, box, at)) if sink else []
    rest = [box]
    for copy in made:
        rest = [part for old in rest for part in old - copy.box]
    if sum(copy.box.cells for copy in made) + sum(part.cells for part in rest) > box.cells:
        # Some cells go to several places, so their sums do not add up: all are summed apart.
        return [Copy(box, entry.shape, size, Spot(at, strides)), *made], False
    for part in rest:  # What is not needed here is summed only.
        inside = [a - b for a, b in zip(part.start, box.start, strict=True)]
        made.append(Copy(part, entry.shape, size, spot(at, size, strides, inside)))
    return made, True


class Reading:
    """Chunks to be read, and what is copied from each (nothing without `sink`): planned once, verified, then filled."""

    def __init__(self, files: Files, wanted: Sequence[Chunk], sink: Sink | None = None) -> None:
        self._files = files
        groups = list(grouped(wanted))
        self._batches = [Batch(groups[at : at + BATCH], sink) for at in range(0, len(groups), BATCH)]

    def verify(self) -> None:
        """Read and verify everything.

        Raises:
            CorruptShard: the first chunk that is not what was saved.
        """
        for batch in self._batches:
            batch.verify(self._files)

    def fill(self) -> None:
        """Read, copy and verify in the same pass: memory that must stay whole on error is verified for before.

        Raises:
            CorruptShard: the first chunk that is not what was saved.
        """
        for batch in self._batches:
            batch.fill(self._files)


def _performed(files: Files, groups: Sequence[Group], rows: Rows, ends: Rows) -> NDArray[np.uint64]:
    """Perform the rows of each group (up to its end) on what it reads; returns the sums of each row."""
    if hasattr(files, "descriptor"):
        answer = _from_files(files, groups, rows, ends)
    elif hasattr(files, "address"):
        answer = _from_memory(files, groups, rows, ends)
    else:
        answer = _from_elsewhere(files, groups, rows, ends)
    return np.frombuffer(answer, "<u8").reshape(-1, 2)


def _from_files(files: Any, groups: Sequence[Group], rows: Rows, ends: Rows) -> bytes:
    reads: list[int] = []
    for group, first, end in zip(groups, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        try:
            fd = files.descriptor(group.file)
        except FileNotFoundError as error:
            raise missing(group.chunks[0], "no such file") from error
        reads += (fd, group.start, group.end - group.start, group.last - group.start, first, end - first)
    answer = native.read_files(struct.pack(f"<{len(reads)}q", *reads), rows.tobytes(), READERS)
    for group, count in zip(groups, struct.unpack_from(f"<{len(groups)}q", answer), strict=True):
        _check_length(group, count)
    return answer[8 * len(groups) :]


def _from_memory(files: Any, groups: Sequence[Group], rows: Rows, ends: Rows) -> bytes:
    moved = rows.copy()
    for group, first, end in zip(groups, ends[:-1], ends[1:], strict=True):
        try:
            moved[first:end, SOURCE] += files.address(group.file) + group.start
        except FileNotFoundError as error:
            raise missing(group.chunks[0], "not in memory") from error
    return native.copy_digest(moved.tobytes(), READERS, 0)


def _from_elsewhere(files: Files, groups: Sequence[Group], rows: Rows, ends: Rows) -> bytes:
    def one(group: Group, first: int, end: int) -> bytes:
        buffer = aligned(group.end - group.start)
        try:
            count = files.read_into(group.file, group.start, memoryview(buffer)[: group.end - group.start])
        except FileNotFoundError as error:
            raise missing(group.chunks[0], "no such file") from error
        _check_length(group, count)
        moved = rows[first:end].copy()
        moved[:, SOURCE] += ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        return native.copy_digest(moved.tobytes(), 1, 0)

    with ThreadPoolExecutor(READERS) as pool:
        return b"".join(pool.map(one, groups, ends[:-1], ends[1:]))


def _check_length(group: Group, count: int) -> None:
    if group.start + count < group.last:
        short = (chunk for chunk in group.chunks if group.start + count < chunk[2] + size_of(chunk[0], chunk[1]))
        raise missing(next(short), "the end of the file")


def missing(chunk: Chunk, what: str) -> CorruptShard:
    entry, box, _, _ = chunk
    return CorruptShard(entry.file, f"{entry.name}{box}", f"{size_of(entry, box)} bytes", what)
