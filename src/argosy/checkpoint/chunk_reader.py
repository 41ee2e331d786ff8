"""Read chunks of a step, each verified as it is copied: in native code from files and memory, else piece by piece.

R5  Chunks that lie side by side are read together; memory for reading does not grow with the state.
"""

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy._select import native
from argosy.checkpoint.files import Files, aligned
from argosy.checkpoint.format import BLOCK, NO_FILE, CorruptShard, Entry, bytes_of
from argosy.checkpoint.step_index import Chunk
from argosy.transfer import CHUNK_BYTES, DTYPES, Box, Copy, Spot, rows_of, spot, strides_of

READERS = 4
BATCH = 32
"""Reads that are planned before the first is performed; then twice as many, while these are."""
DOUBLED = 3
"""How often batches grow: up to 2 GiB, for which Ctrl-C waits."""
GAP_BYTES = 64 << 10
Copies = Callable[[Entry, Box, int], Iterable[Copy]]
"""Given a chunk that lies at an address: the copies to be made of it."""
Rows = NDArray[np.int64]
SOURCE, DESTINATION = 0, 1
ONCE = (1, 1, 1, *[0] * 9)
"""Counts and strides of a job that has one run."""


class Sinks(NamedTuple):
    """Where chunks go; by default they are only summed."""

    plain: Mapping[str, int] = {}
    """Tensors that lie in memory whole and in their order, as most do: their addresses."""
    copies: Copies | None = None


class Table(NamedTuple):
    """Records for native code, and where those of each group begin: one more than there are groups."""

    rows: Rows
    ends: Rows

    def of(self, group: int) -> Rows:
        return self.rows[self.ends[group] : self.ends[group + 1]]


class Group(NamedTuple):
    """Chunks that are read together: `start` and `end` are whole blocks of a file, `last` is behind what is needed."""

    file: str
    start: int
    end: int
    last: int
    chunks: list[Chunk]


def size_of(entry: Entry, box: Box) -> int:
    return bytes_of(box.shape, entry.dtype)


def grouped(wanted: Sequence[Chunk]) -> Iterator[Group]:
    """Put chunks together that lie side by side, up to 8 MiB; in the order of their files."""
    file, begin, end, last = "", 0, 0, 0
    chunks: list[Chunk] = []
    for chunk in sorted(wanted, key=lambda chunk: (chunk[0].file, chunk[2])):
        entry, box, offset, _ = chunk
        stop = offset + bytes_of(box.shape, entry.dtype)
        is_near = chunks and entry.file == file and offset // BLOCK * BLOCK <= end + GAP_BYTES
        if is_near and max(-(-stop // BLOCK) * BLOCK, end) - begin <= CHUNK_BYTES:
            chunks.append(chunk)
            end, last = max(-(-stop // BLOCK) * BLOCK, end), max(stop, last)
            continue
        if chunks:
            yield Group(file, begin, end, last, chunks)
        file, begin, end, last = entry.file, offset // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK, stop
        chunks = [chunk]
    if chunks:
        yield Group(file, begin, end, last, chunks)


class Batch:
    """Reads with the copies that follow each of them, as tables for native code. Sources are counted from each read."""

    def __init__(self, groups: Sequence[Group], sinks: Sinks) -> None:
        self.groups = groups
        self.chunks = [chunk for group in groups for chunk in group.chunks]
        self._is_plain = True
        rows: list[tuple[int, ...]] = []
        summed: list[bool] = []
        """Whether the sums of a row are part of its chunk's: else it copies what another row sums."""
        starts: list[int] = []
        ends: list[int] = []
        for group in groups:
            for chunk in group.chunks:
                starts.append(len(rows))
                entry, box, offset, _ = chunk
                at, inside = offset - group.start, offset - entry.offset
                address = sinks.plain.get(entry.name)
                if entry.box.shape == entry.shape and (address is not None or sinks.copies is None):
                    rows.append((at, address + inside if address else 0, inside, size_of(entry, box)))
                    summed.append(True)
                else:
                    self._is_plain = False
                    made, together = _made(chunk, at, sinks.copies)
                    for number, copy in enumerate(made):
                        rows += rows_of(copy)
                        summed += [together or not number] * (len(rows) - len(summed))
            ends.append(len(rows))
        self._jobs = Table(_full(rows), np.array([0, *ends], np.int64))
        self._summed, self._starts = np.array(summed, bool), np.array(starts, np.int64)
        sums = bytes.fromhex("".join(chunk[3] for chunk in self.chunks))
        self._expected = np.frombuffer(sums, ">u8").reshape(-1, 2).astype(np.uint64)

    def verify(self, files: Files) -> None:
        """Read and sum; nothing is written."""
        if self._is_plain and not self._jobs.rows[:, DESTINATION].any():  # It goes nowhere anyway.
            self.fill(files)
            return
        rows = self._jobs.rows[self._summed]
        rows[:, DESTINATION] = 0
        places = np.concatenate([[0], np.cumsum(self._summed)])
        sums = _performed(files, self.groups, Table(rows, places[self._jobs.ends]))
        self._check(sums, places[self._starts])

    def fill(self, files: Files) -> None:
        """Read, copy and sum in one pass."""
        sums = _performed(files, self.groups, self._jobs)
        places = np.concatenate([[0], np.cumsum(self._summed)])
        self._check(sums[self._summed], places[self._starts])

    def _check(self, sums: NDArray[np.uint64], starts: Rows) -> None:
        found = np.add.reduceat(sums, starts, axis=0, dtype=np.uint64)
        wrong = np.flatnonzero((found != self._expected).any(axis=1))
        if len(wrong):
            entry, box, _, expected = self.chunks[int(wrong[0])]
            actual = "".join(f"{int(word):016x}" for word in found[wrong[0]])
            raise CorruptShard(entry.file, f"{entry.name}{box}", expected, actual)


def _full(rows: list[tuple[int, ...]]) -> Rows:
    """Rows for native code; those of chunks that have one run say it only up to its length."""
    table = np.zeros((len(rows), 16), "<i8")
    table[:, 4:] = ONCE
    is_short = [len(row) == 4 for row in rows]
    if all(is_short):
        table[:, :4] = np.array(rows, "<i8").reshape(-1, 4)
    else:
        table[:] = [(*row, *ONCE) if short else row for row, short in zip(rows, is_short, strict=True)]
    return table


def _made(chunk: Chunk, at: int, sink: Copies | None) -> tuple[list[Copy], bool]:
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
    """Chunks to be read, and where each of them goes: planned once, verified, then filled."""

    def __init__(self, files: Files, wanted: Sequence[Chunk], sinks: Sinks | None = None) -> None:
        self._files, self._sinks, self._groups = files, sinks or Sinks(), grouped(wanted)
        self._batches: list[Batch] = []

    def batches(self) -> Iterator[Batch]:
        """The batches, each when it is planned."""
        yield from self._batches
        # The first ones are soon planned, those that follow long enough: each makes buffers and waits for its end.
        while groups := list(islice(self._groups, BATCH << min(len(self._batches), DOUBLED))):
            self._batches.append(Batch(groups, self._sinks))
            yield self._batches[-1]

    def verify(self) -> None:
        """Read and verify everything.

        Raises:
            CorruptShard: the first chunk that is not what was saved.
        """
        self._each(Batch.verify)

    def fill(self) -> None:
        """Read, copy and verify in the same pass: memory that must stay whole on error is verified for before.

        Raises:
            CorruptShard: the first chunk that is not what was saved.
        """
        self._each(Batch.fill)

    def _each(self, perform: Callable[[Batch, Files], None]) -> None:
        """Perform batch by batch; the next one is planned meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            under_way: Future[None] | None = None
            for batch in self.batches():
                if under_way is not None:
                    under_way.result()
                under_way = pool.submit(self._perform, perform, batch)
            if under_way is not None:
                under_way.result()

    def _perform(self, perform: Callable[[Batch, Files], None], batch: Batch) -> None:
        """Perform a batch; again where bytes came over a network and are not what was saved: a bit may have flipped."""
        try:
            perform(batch, self._files)
        except CorruptShard:
            if hasattr(self._files, "descriptor") or hasattr(self._files, "address"):
                raise
            perform(batch, self._files)


def _performed(files: Files, groups: Sequence[Group], jobs: Table) -> NDArray[np.uint64]:
    """Perform the jobs of each group on what it reads; returns the sums of each job."""
    if not groups:
        return np.zeros((0, 2), np.uint64)
    if hasattr(files, "descriptor"):
        answer = _from_files(files, groups, jobs)
    elif hasattr(files, "address"):
        answer = _from_memory(files, groups, jobs)
    else:
        answer = _from_elsewhere(files, groups, jobs)
    return np.frombuffer(answer, "<u8").reshape(-1, 2)


def _from_files(files: Any, groups: Sequence[Group], jobs: Table) -> bytes:
    reads: list[int] = []
    firsts = zip(jobs.ends.tolist(), np.diff(jobs.ends).tolist(), strict=False)
    for group, own in zip(groups, firsts, strict=False):
        try:
            fd = files.descriptor(group.file)
        except FileNotFoundError as error:
            raise missing(group.chunks[0], NO_FILE) from error
        reads += (fd, group.start, group.end - group.start, group.last - group.start, *own)
    table = struct.pack(f"<{len(reads)}q", *reads)
    answer = native.read_files(table, jobs.rows.tobytes(), READERS)
    for group, count in zip(groups, struct.unpack_from(f"<{len(groups)}q", answer), strict=True):
        _check_length(group, count)
    return answer[8 * len(groups) :]


def _from_memory(files: Any, groups: Sequence[Group], jobs: Table) -> bytes:
    moved = jobs.rows.copy()
    for number, group in enumerate(groups):
        try:
            moved[jobs.ends[number] : jobs.ends[number + 1], SOURCE] += files.address(group.file) + group.start
        except FileNotFoundError as error:
            raise missing(group.chunks[0], "not in memory") from error
    return native.copy_digest(moved.tobytes(), READERS, 0)


def _from_elsewhere(files: Files, groups: Sequence[Group], jobs: Table) -> bytes:
    def one(number: int) -> bytes:
        group = groups[number]
        buffer = aligned(group.end - group.start)
        try:
            count = files.read_into(group.file, group.start, memoryview(buffer)[: group.end - group.start])
        except FileNotFoundError as error:
            raise missing(group.chunks[0], NO_FILE) from error
        _check_length(group, count)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        own = jobs.of(number).copy()
        own[:, SOURCE] += address
        return native.copy_digest(own.tobytes(), 1, 0)

    with ThreadPoolExecutor(READERS) as pool:
        return b"".join(pool.map(one, range(len(groups))))


def _check_length(group: Group, count: int) -> None:
    if group.start + count < group.last:
        short = (chunk for chunk in group.chunks if group.start + count < chunk[2] + size_of(chunk[0], chunk[1]))
        raise missing(next(short), "the end of the file")


def missing(chunk: Chunk, what: str) -> CorruptShard:
    entry, box, _, _ = chunk
    return CorruptShard(entry.file, f"{entry.name}{box}", f"{size_of(entry, box)} bytes", what)
