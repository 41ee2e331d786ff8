"""Read chunks of a step, each verified as it is copied: in native code from files and memory, else piece by piece.

R5  Chunks that lie side by side are read together; memory for reading does not grow with the state.
"""

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from argosy._select import native
from argosy.checkpoint.files import Files, aligned
from argosy.checkpoint.format import BLOCK, CorruptShard, Entry, sums_text
from argosy.checkpoint.reading import Chunk
from argosy.transfer import (
    CHUNK_BYTES,
    DTYPES,
    Box,
    Copy,
    Spot,
    Sums,
    add,
    copy_boxes,
    records_of,
    strides_of,
    sums_of,
)

READERS = 4
BATCH = 2048
"""Reads that are planned at a time."""
GAP_BYTES = 64 << 10
Sink = Callable[[Entry, Box, int], Iterable[Copy]]
"""Given a chunk that lies at an address: the copies to be made of it."""


class Group(NamedTuple):
    """Chunks that are read together: `start` and `end` are whole blocks of the file."""

    file: str
    start: int
    end: int
    chunks: list[Chunk]

    @property
    def last(self) -> int:
        """Behind the last byte that is needed."""
        return max(offset + size_of(entry, box) for entry, box, offset, _ in self.chunks)


def size_of(entry: Entry, box: Box) -> int:
    return box.cells * DTYPES[entry.dtype]


def grouped(wanted: Sequence[Chunk]) -> Iterator[Group]:
    """Put chunks together that lie side by side, up to 8 MiB; in the order of their files."""
    ordered = sorted(wanted, key=lambda chunk: (chunk[0].file, chunk[2]))
    group: Group | None = None
    for chunk in ordered:
        entry, box, offset, _ = chunk
        start, end = offset // BLOCK * BLOCK, -(-(offset + size_of(entry, box)) // BLOCK) * BLOCK
        near = group is not None and group.file == entry.file and start <= group.end + GAP_BYTES
        if near and group is not None and max(end, group.end) - group.start <= CHUNK_BYTES:
            group.chunks.append(chunk)
            group = group._replace(end=max(end, group.end))
            continue
        if group is not None:
            yield group
        group = Group(entry.file, start, end, [chunk])
    if group is not None:
        yield group


def read_chunks(files: Files, wanted: Sequence[Chunk], sink: Sink | None = None) -> None:
    """Read and verify chunks; give each to `sink`, which says what to copy from it.

    What is copied is verified in the same pass, so memory that must stay whole on error is only written to
    after a first pass without a sink.

    Raises:
        CorruptShard: the first chunk that is not what was saved.
    """
    groups = list(grouped(wanted))
    for at in range(0, len(groups), BATCH):
        batch = groups[at : at + BATCH]
        if hasattr(files, "descriptor"):
            _read_files(files.descriptor, batch, sink)  # type: ignore[attr-defined]
        elif hasattr(files, "address"):
            _read_memory(files.address, batch, sink)  # type: ignore[attr-defined]
        else:
            _read_elsewhere(files, batch, sink)


def _made(chunk: Chunk, at: int, sink: Sink | None) -> tuple[list[Copy], bool]:
    """The copies for a chunk at an address, and whether their sums together are the chunk's."""
    entry, box, _, _ = chunk
    made = list(sink(entry, box, at)) if sink else []
    if made and sum(copy.box.cells for copy in made) == box.cells:
        return made, True  # Copied and summed in one pass.
    return [Copy(box, entry.shape, DTYPES[entry.dtype], Spot(at, strides_of(box.shape))), *made], False


def _check(chunk: Chunk, sums: Sequence[Sums], together: bool) -> None:
    entry, box, _, expected = chunk
    found = sums_text(add(sums) if together else sums[0])
    if found != expected:
        raise CorruptShard(entry.file, f"{entry.name}{box}", expected, found)


def _read_files(descriptor: Callable[[str], int], batch: Sequence[Group], sink: Sink | None) -> None:
    reads: list[int] = []
    tables: list[bytes] = []
    planned: list[tuple[Group, list[tuple[Chunk, bool, list[int]]]]] = []
    jobs = 0
    for group in batch:
        try:
            fd = descriptor(group.file)
        except FileNotFoundError as error:
            raise missing(group.chunks[0], "no such file") from error
        first, plans = jobs, list[tuple[Chunk, bool, list[int]]]()
        for chunk in group.chunks:
            made, together = _made(chunk, chunk[2] - group.start, sink)
            table, counts = records_of(made)
            tables.append(table)
            jobs += sum(counts)
            plans.append((chunk, together, counts))
        reads += (fd, group.start, group.end - group.start, group.last - group.start, first, jobs - first)
        planned.append((group, plans))
    answer = native.read_files(struct.pack(f"<{len(reads)}q", *reads), b"".join(tables), READERS)
    at = 8 * len(batch)
    for number, (group, plans) in enumerate(planned):
        (count,) = struct.unpack_from("<q", answer, 8 * number)
        is_whole = count >= group.last - group.start
        for chunk, together, counts in plans:
            if group.start + count < chunk[2] + size_of(chunk[0], chunk[1]):
                raise missing(chunk, "the end of the file")
            end = at + 16 * sum(counts)
            if is_whole:
                _check(chunk, sums_of(answer[at:end], counts), together)
            at = end


def missing(chunk: Chunk, what: str) -> CorruptShard:
    entry, box, _, _ = chunk
    return CorruptShard(entry.file, f"{entry.name}{box}", f"{size_of(entry, box)} bytes", what)


def _read_memory(address: Callable[[str], int], batch: Sequence[Group], sink: Sink | None) -> None:
    copies: list[Copy] = []
    plans: list[tuple[Chunk, bool, int]] = []
    for chunk in (chunk for group in batch for chunk in group.chunks):
        try:
            made, together = _made(chunk, address(chunk[0].file) + chunk[2], sink)
        except FileNotFoundError as error:
            raise missing(chunk, "not in memory") from error
        copies += made
        plans.append((chunk, together, len(made)))
    sums = copy_boxes(copies, READERS)
    at = 0
    for chunk, together, count in plans:
        _check(chunk, sums[at : at + count], together)
        at += count


def _read_elsewhere(files: Files, batch: Sequence[Group], sink: Sink | None) -> None:
    def one(group: Group) -> None:
        buffer = aligned(group.end - group.start)
        try:
            count = files.read_into(group.file, group.start, memoryview(buffer)[: group.end - group.start])
        except FileNotFoundError as error:
            raise missing(group.chunks[0], "no such file") from error
        base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for chunk in group.chunks:
            if group.start + count < chunk[2] + size_of(chunk[0], chunk[1]):
                raise missing(chunk, "the end of the file")
            made, together = _made(chunk, base + chunk[2] - group.start, sink)
            _check(chunk, copy_boxes(made), together)

    with ThreadPoolExecutor(READERS) as pool:
        for result in [pool.submit(one, group) for group in batch]:
            result.result()
