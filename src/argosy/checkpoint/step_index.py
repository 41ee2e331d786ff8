"""Find the steps of a directory, and read pieces of them, each verified.

R1  Nothing is handed out that was not verified by its digest.
R2  A step is read only through its root: directories without one do not count.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from argosy.checkpoint.files import Files
from argosy.checkpoint.format import (
    NO_FILE,
    ROOT,
    CorruptShard,
    Draft,
    Entry,
    Index,
    Root,
    StepNotFound,
    UnitInfo,
    Unreadable,
    bytes_of,
    decode_index,
    era_of,
    step_of,
    unseal,
)
from argosy.core import ArgosyError
from argosy.transfer import (
    CHUNK_BYTES,
    DTYPES,
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
    spot_in,
    strides_of,
)

IS_SUM, IS_HEX = re.compile(r"[0-9a-f]{32}").fullmatch, re.compile(r"[0-9a-f]*").fullmatch
Chunk = tuple[Entry, Box, int, str]
"""A chunk of an entry: its box, its offset in the file, its sums."""

T = TypeVar("T")
ELSEWHERE = "if the script gave its Saver another path, its steps are there: give that path"


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
    modules: dict[str, str] = {}

    def add(self, part: Index | Draft) -> None:
        """What one rank wrote, or will."""
        self.entries += part.entries
        self.values |= part.values
        self.units |= part.units
        self.modules |= part.modules


def read_sound(files: Files, path: str, sound: Callable[[bytes], T]) -> T:
    """Read a small file, and once more if it is not sound: a bit may have flipped on its way from a store."""
    try:
        return sound(files.read(path))
    except CorruptShard:
        return sound(files.read(path))


def roots(files: Files) -> Iterator[tuple[str, Root | ArgosyError]]:
    """Every step directory that has a root, newest first, with its manifest or what is wrong with it."""
    names = [name for name in files.listdir(".") if step_of(name) is not None]
    found: list[tuple[str, Root | ArgosyError]] = []
    for name in names:
        try:
            found.append((name, read_root(files, name)))
        except FileNotFoundError:
            continue
        except ArgosyError as error:
            found.append((name, error))

    def newest(item: tuple[str, Root | ArgosyError]) -> tuple[int, int, float]:
        name, root = item
        return era_of(name), step_of(name) or 0, root.saved_at if isinstance(root, Root) else 0.0

    yield from sorted(found, key=newest, reverse=True)


def read_root(files: Files, name: str) -> Root:
    """The manifest of a step.

    Raises:
        FileNotFoundError: there is none.
        Unreadable: it cannot be read.
        CorruptShard: it is altered, or another step's.
    """
    path = f"{name}/{ROOT}"
    try:
        root = read_sound(files, path, lambda data: unseal(data, path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error}") from error
    if (root.era, root.step, root.session) != (era_of(name), step_of(name), name.rpartition("-")[2]):
        raise CorruptShard(path, "the root manifest", f"that of {name}", f"that of step {root.step}, {root.session}")
    return root


def open_step(files: Files, name: str, root: Root) -> Step:
    """Read the indexes of a step; the lengths of its files are checked, their bytes are not yet.

    Raises:
        CorruptShard: an index is altered, or a file is missing or too short.
    """
    step = Step(name=name, root=root)
    for part in root.parts:
        if part.file.rpartition("/")[0] != name:
            raise CorruptShard(f"{name}/{ROOT}", "an index", f"a file of {name}", part.file)
        try:
            index: Index = read_sound(files, part.file, lambda data, part=part: decode_index(data, part))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise CorruptShard(part.file, "the index", part.digest, NO_FILE) from error
        step.add(index)
    for file, end in check_entries(step.entries).items():
        try:
            size = files.size(file)
        except FileNotFoundError as error:
            raise CorruptShard(file, "the segment", f"{end} bytes", NO_FILE) from error
        if size < end:
            raise CorruptShard(file, "the segment", f"{end} bytes", f"{size} bytes")
    return step


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
        try:
            root = read_root(self.files, name)
        except FileNotFoundError as error:
            raise CorruptShard(f"{name}/{ROOT}", "the root manifest", "a file", NO_FILE) from error
        return self.files, open_step(self.files, name, root)

    def close(self) -> None:
        closing = getattr(self.files, "close", None)
        if closing is not None:
            closing()


def find_step(files: Files, step: int | None, where: str) -> Iterator[Step]:
    """The asked step, or all from the newest on, as far as they can be opened; errors say `where` that was.

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
        what = f"no step was committed in {where}" if step is None else f"step {step} was not committed in {where}"
        if faults:
            what = f"no step is whole in {where}" if step is None else f"step {step} is not whole"
        known = [str(step_of(name)) for name, _ in roots(files)][:8]
        hint = "; ".join(faults) or (f"there are {', '.join(known)}" if known else ELSEWHERE)
        raise StepNotFound(what, hint=hint)


def check_entries(entries: Sequence[Entry]) -> dict[str, int]:
    """See to it that entries can be what a save wrote: what they say is used as sizes and addresses.

    Returns how long each file must be at least; one of which nothing is needed (a save of tensors without cells alone)
    need not be there.
    """
    sizes: dict[tuple[str, tuple[int, ...], Box], int] = {}
    first: dict[str, Entry] = {}
    files: set[str] = set()
    ends: dict[str, int] = {}
    for entry in entries:
        form = entry.dtype, entry.shape, entry.box
        size = sizes.get(form)
        if size is None:
            if entry.dtype not in DTYPES or not _is_inside(entry.box, entry.shape):
                raise CorruptShard(entry.file, entry.name, "a box of a tensor", f"{entry.box} of {entry.shape}")
            size = sizes[form] = entry.bytes
        one = first.setdefault(entry.name, entry)
        if one is not entry and (one.dtype, one.shape) != (entry.dtype, entry.shape):
            raise CorruptShard(entry.file, entry.name, f"{one.dtype}{list(one.shape)}", f"{entry.dtype}{entry.shape}")
        if entry.file not in files:
            directory, _, file = entry.file.partition("/")
            if step_of(directory) is None or "/" in file or not file.endswith(".safetensors"):
                raise CorruptShard(entry.file, entry.name, "a segment of a step", entry.file)
            files.add(entry.file)
        if entry.offset < 0:
            raise CorruptShard(entry.file, entry.name, "an offset", str(entry.offset))
        if size and entry.offset + size > ends.get(entry.file, 0):
            ends[entry.file] = entry.offset + size
    _check_sums(entries)
    return ends


def _check_sums(entries: Sequence[Entry]) -> None:
    """All in one look, as they are many; the wrong one is searched for only where there is one."""
    sums = [each for entry in entries for each in entry.sums]
    if set(map(len, sums)) <= {32} and IS_HEX("".join(sums)):
        return
    for entry in entries:
        if not all(map(IS_SUM, entry.sums)):
            raise CorruptShard(entry.file, entry.name, "sums", str(entry.sums[:3]))


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    spans = zip(box.start, box.shape, shape, strict=False)
    is_flat = len(box.start) == len(box.shape) == len(shape)
    return is_flat and all(first >= 0 and size >= 0 and first + size <= whole for first, size, whole in spans)


def stored_state(step: Step) -> State:
    """The description of what a step holds; each tensor's layout is the boxes that were written."""
    boxes: dict[str, list[Piece]] = {}
    first: dict[str, Entry] = {}
    for entry in step.entries:
        first.setdefault(entry.name, entry)
        if entry.box.shape == entry.shape:
            continue
        piece = Piece(len(boxes.get(entry.name, ())), entry.box, 0, strides_of(entry.box.shape))
        boxes.setdefault(entry.name, []).append(piece)
    units = {name: Unit(name, {}, dict(info.options), info.aliases) for name, info in step.units.items()}
    for name, entry in first.items():
        unit = units.get(entry.unit)
        if unit is None:
            unit = units[entry.unit] = Unit(entry.unit)
        is_whole = entry.box.shape == entry.shape
        layout = replicated(entry.shape) if is_whole else Layout(entry.shape, tuple(boxes[name]))
        unit.members[entry.key] = Member(entry.key, entry.role, entry.dtype, layout, None, entry.kind)  # type: ignore[arg-type]
    return State(units=units, values=dict(step.values))


def all_chunks(entries: Iterable[Entry]) -> list[Chunk]:
    """Every chunk of these entries with its sums."""
    found: list[Chunk] = []
    for entry in entries:
        if len(entry.sums) == 1 and 0 < bytes_of(entry.box.shape, entry.dtype) <= CHUNK_BYTES:  # As most are.
            found.append((entry, entry.box, entry.offset, entry.sums[0]))
            continue
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
            source, begin = Spot(address, strides_of(box.shape)), to(entry.name) + piece.offset * size
            yield Copy(common, entry.shape, size, source, Spot(begin, piece.strides))
            continue
        inside = [a - b for a, b in zip(common.start, box.start, strict=True)]
        source = spot(address, size, strides_of(box.shape), inside)
        yield Copy(common, entry.shape, size, source, spot_in(piece, to(entry.name), size, common.start))
