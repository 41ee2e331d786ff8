"""Find the steps of a directory, and read pieces of them, each verified.

R1  Nothing is handed out that was not verified by its digest.
R2  A step is read only through its root: directories without one do not count.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from argosy.checkpoint.files import Files
from argosy.checkpoint.format import (
    ROOT,
    CorruptShard,
    Entry,
    Index,
    Root,
    StepNotFound,
    UnitInfo,
    decode_index,
    era_of,
    step_of,
    unseal,
)
from argosy.core import ArgosyError
from argosy.transfer import (
    Box,
    Copy,
    Layout,
    Member,
    Piece,
    Spot,
    State,
    Unit,
    Value,
    replicated,
    spot,
    strides_of,
)

Chunk = tuple[Entry, Box, int, str]
"""A chunk of an entry: its box, its offset in the file, its sums."""
Sink = Callable[[Entry, Box, int], Iterable[Copy]]
"""Given a chunk that lies at an address: the copies to be made of it."""


class Candidate(NamedTuple):
    """A step that a source seems to have; the larger the newer."""

    era: int
    step: int
    saved_at: float
    name: str


class Source(Protocol):
    """A place that steps can be restored from."""

    label: str

    def candidates(self) -> list[Candidate]: ...
    def open(self, name: str) -> "tuple[Files, Step]":
        """Open a step; raises an ArgosyError if it cannot be used."""
        ...

    def close(self) -> None: ...


class Step(msgspec.Struct, kw_only=True):
    """A committed step: its root, and its indexes when they were needed."""

    name: str
    root: Root
    entries: list[Entry] = []
    values: dict[str, Value] = {}
    units: dict[str, UnitInfo] = {}


def roots(files: Files) -> Iterator[tuple[str, Root | ArgosyError]]:
    """Every step directory that has a root, newest first, with its manifest or what is wrong with it."""
    names = [name for name in files.listdir(".") if step_of(name) is not None]
    found: list[tuple[str, Root | ArgosyError]] = []
    for name in names:
        path = f"{name}/{ROOT}"
        try:
            found.append((name, unseal(files.read(path), path)))
        except FileNotFoundError:
            continue
        except ArgosyError as error:
            found.append((name, error))

    def newest(item: tuple[str, Root | ArgosyError]) -> tuple[int, int, float]:
        name, root = item
        return era_of(name), step_of(name) or 0, root.saved_at if isinstance(root, Root) else 0.0

    yield from sorted(found, key=newest, reverse=True)


def open_step(files: Files, name: str, root: Root) -> Step:
    """Read the indexes of a step; the lengths of its files are checked, their bytes are not yet.

    Raises:
        CorruptShard: an index is altered, or a file is missing or too short.
    """
    entries: list[Entry] = []
    values: dict[str, Value] = {}
    units: dict[str, UnitInfo] = {}
    for part in root.parts:
        try:
            index: Index = decode_index(files.read(part.file), part)
        except FileNotFoundError as error:
            raise CorruptShard(part.file, "the index", part.digest, "no such file") from error
        entries += index.entries
        values |= index.values
        units |= index.units
    ends: dict[str, int] = {}
    for entry in entries:
        ends[entry.file] = max(ends.get(entry.file, 0), entry.offset + entry.bytes)
    for file, end in ends.items():
        try:
            size = files.size(file)
        except FileNotFoundError as error:
            raise CorruptShard(file, "the segment", f"{end} bytes", "no such file") from error
        if size < end:
            raise CorruptShard(file, "the segment", f"{end} bytes", f"{size} bytes")
    return Step(name=name, root=root, entries=entries, values=values, units=units)


class FilesSource:
    """Committed steps, on a disk or in a store."""

    def __init__(self, files: Files, label: str) -> None:
        self.files, self.label = files, label

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(era_of(name), step_of(name) or 0, root.saved_at if isinstance(root, Root) else 0.0, name)
            for name, root in roots(self.files)
        ]

    def open(self, name: str) -> tuple[Files, Step]:
        path = f"{name}/{ROOT}"
        try:
            root = unseal(self.files.read(path), path)
        except FileNotFoundError as error:
            raise CorruptShard(path, "the root manifest", "a file", "no such file") from error
        return self.files, open_step(self.files, name, root)

    def close(self) -> None:
        closing = getattr(self.files, "close", None)
        if closing is not None:
            closing()


def find_step(files: Files, step: int | None) -> Iterator[Step]:
    """The asked step, or all from the newest on, as far as they can be opened.

    Raises:
        StepNotFound: there is none (any more).
        CorruptShard: the asked step cannot be opened.
    """
    faults: list[str] = []
    seen = False
    for name, root in roots(files):
        if step is not None and step_of(name) != step:
            continue
        try:
            if isinstance(root, ArgosyError):
                raise root
            opened = open_step(files, name, root)
        except ArgosyError as error:
            faults.append(f"{name}: {error}")
            continue
        seen = True
        yield opened
    if not seen:
        what = "no step was committed here" if step is None else f"step {step} was not committed here"
        known = [str(step_of(name)) for name, _ in roots(files)][:8]
        hint = "; ".join(faults) or (f"there are {', '.join(known)}" if known else "")
        raise StepNotFound(what, hint=hint)


def stored_state(step: Step) -> State:
    """The description of what a step holds; each tensor's layout is the boxes that were written."""
    state = State(values=dict(step.values))
    boxes: dict[str, list[Piece]] = {}
    first: dict[str, Entry] = {}
    for entry in step.entries:
        first.setdefault(entry.name, entry)
        if entry.box.shape == entry.shape:
            continue
        piece = Piece(len(boxes.get(entry.name, ())), entry.box, 0, strides_of(entry.box.shape))
        boxes.setdefault(entry.name, []).append(piece)
    for name, entry in first.items():
        unit = state.units.setdefault(entry.unit, Unit(entry.unit))
        is_whole = entry.box.shape == entry.shape
        layout = replicated(entry.shape) if is_whole else Layout(entry.shape, tuple(boxes[name]))
        unit.members[entry.key] = Member(entry.key, entry.role, entry.dtype, layout, None, entry.kind)  # type: ignore[arg-type]
    for name, info in step.units.items():
        unit = state.units.setdefault(name, Unit(name))
        unit.options, unit.aliases = dict(info.options), info.aliases
    return state


def all_chunks(entries: Iterable[Entry]) -> list[Chunk]:
    """Every chunk of these entries with its sums."""
    found: list[Chunk] = []
    for entry in entries:
        parts = entry.chunks()
        if len(parts) != len(entry.sums):
            raise CorruptShard(entry.file, entry.name, f"{len(parts)} digests", f"{len(entry.sums)} digests")
        found += [(entry, box, offset, sums) for (box, offset), sums in zip(parts, entry.sums, strict=True)]
    return found


def chunk_copies(
    entry: Entry, box: Box, address: int, member: Member, rank: int, to: Callable[[str], int]
) -> Iterator[Copy]:
    """The copies from a chunk at `address` into the pieces of a rank; `to` says where the tensor of a name begins."""
    size = member.itemsize
    for piece in member.layout.by_rank.get(rank, ()):
        common = piece.box & box
        if common is None:
            continue
        if common is piece.box:  # Both the same box, as most are.
            source, begin = Spot(address, strides_of(box.shape)), to(piece.tensor or entry.name) + piece.offset * size
            yield Copy(common, entry.shape, size, source, Spot(begin, piece.strides))
            continue
        inside = [a - b for a, b in zip(common.start, box.start, strict=True)]
        place = [a - b for a, b in zip(common.start, piece.box.start, strict=True)]
        source = spot(address, size, strides_of(box.shape), inside)
        yield Copy(common, entry.shape, size, source, _spot_of(piece, to(piece.tensor or entry.name), size, place))


def _spot_of(piece: Piece, address: int, size: int, place: Sequence[int]) -> Spot:
    return spot(address + piece.offset * size, size, piece.strides, place)
