"""Where stored chunks go in live memory: which of them a rank needs, and at which addresses their cells are written."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from argosy.checkpoint.chunk_reader import Sinks
from argosy.checkpoint.format import CorruptShard, Entry
from argosy.checkpoint.snapshot import address_of
from argosy.checkpoint.state_input import landing
from argosy.checkpoint.step_index import Chunk, all_chunks, chunk_copies
from argosy.transfer import Box, Copy, Member, Piece, held, is_plain, strides_of

T = TypeVar("T")


class _ByLayout(dict[int, T]):
    """What follows from the layout of a member alone: many have the same one."""

    def __init__(self, make: Callable[[Member], T]) -> None:
        self._make = make

    def of(self, member: Member) -> T:
        key = id(member.layout)
        if key not in self:
            self[key] = self._make(member)
        return self[key]


def wanted_chunks(
    entries: Iterable[Entry],
    targets: Mapping[str, Member],
    rank: int,
) -> list[Chunk]:
    """The chunks that have cells which this rank needs.

    Raises:
        CorruptShard: some of its cells were saved by nobody.
    """
    boxes_of = _ByLayout(lambda member: [piece.box for piece in held(member, rank)])
    mine = {name: boxes_of.of(member) for name, member in targets.items()}
    missing = dict(mine)
    near: list[Entry] = []
    for entry in entries:
        boxes = mine.get(entry.name, [])
        if boxes == [entry.box]:  # As most are.
            near.append(entry)
            missing[entry.name] = []
        elif any(box & entry.box for box in boxes):
            near.append(entry)
            missing[entry.name] = [part for box in missing[entry.name] for part in box - entry.box]
    for name, boxes in missing.items():
        if boxes:
            raise CorruptShard(name, f"{boxes[0]}", "a saved box", "none")
    chunks = all_chunks(near)
    if all(len(entry.sums) == 1 for entry in near):
        return chunks
    return [c for c in chunks if len(c[0].sums) == 1 or any(box & c[1] for box in mine[c[0].name])]


def _memory(local: Any) -> tuple[int, bool, bool]:
    """Which memory a tensor is in, and how it is seen there."""
    is_torch = hasattr(local, "data_ptr")
    return address_of(local), is_torch and local.is_conj(), is_torch and local.is_neg()


class Landing:
    """Where stored tensors go in memory; one that is not plain CPU memory gets its bytes through memory that is."""

    def __init__(self, targets: Mapping[str, Member], rank: int) -> None:
        self._targets, self._rank = targets, rank
        self._landings: dict[tuple[int, bool, bool], tuple[Any, Callable[[], None]]] = {}
        self.addresses: dict[str, int] = {}
        # In the order of targets, which is about that of memory: in another one each look would miss the cache.
        for name in [name for name, member in targets.items() if held(member, rank)]:
            local = targets[name].local
            if not is_plain(local):
                memory = _memory(local)
                if memory not in self._landings:  # Tensors of one flat buffer land together.
                    self._landings[memory] = landing(local)
                local = self._landings[memory][0]
            self.addresses[name] = address_of(local)

    def sinks(self) -> Sinks:
        """How chunks go there."""
        plain: dict[str, int] = {}
        pieces = _ByLayout(self._plain)
        for name, member in self._targets.items():
            piece = pieces.of(member)
            if piece is not None:
                plain[name] = self.addresses[name] + piece.offset * member.itemsize
        return Sinks(plain, self._copies)

    def _plain(self, member: Member) -> Piece | None:
        """The whole of a tensor in its order, if this rank has it so."""
        pieces = held(member, self._rank)
        is_whole = len(pieces) == 1 and pieces[0].box.shape == member.shape
        return pieces[0] if is_whole and pieces[0].strides == strides_of(member.shape) else None

    def _copies(self, entry: Entry, box: Box, address: int) -> Iterable[Copy]:
        """The copies of a chunk at an address."""
        return chunk_copies(entry, box, address, self._targets[entry.name], self._rank, self.addresses.__getitem__)

    def finish(self) -> None:
        """Make the bytes the tensors'."""
        for _, land in self._landings.values():
            land()
