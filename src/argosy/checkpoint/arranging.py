"""Decide which rank writes which box, and where each lies in its segment. Pure, and the same on every rank.

A1  Buffers may differ between ranks (BatchNorm's do): all that are replicated are the first rank's, never some of each.
A2  Who writes a box depends only on tensors that all its holders have: ranks with different parts of a model, as in a
    pipeline, decide alike, so each box is written by exactly one of them.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from math import prod

from argosy.checkpoint.format import Draft, Entry, Index, chunks, digest, header
from argosy.transfer import Box, Copy, Member, Piece, Role, Spot, State, cut, held, spot, strides_of, whole

SHARE_BYTES = 64 << 20
"""A replicated box larger than this is written by its holders together."""
SMALL_BYTES = 64 << 10
"""Those up to this size (steps, biases) go to the holders in turn, however much they write: that is decided at once."""


class Share:
    """One box that this rank writes, and the memory it comes from."""

    __slots__ = ("box", "has_moments", "member", "name", "offset", "piece", "unit")

    def __init__(self, name: str, unit: str, member: Member, piece: Piece, box: Box) -> None:
        self.name, self.unit, self.member, self.piece, self.box = name, unit, member, piece, box
        self.offset, self.has_moments = 0, False

    @property
    def bytes(self) -> int:
        return self.box.cells * self.member.itemsize

    @property
    def label(self) -> str:
        """Its name in a safetensors file: that of the tensor if it is whole."""
        return self.name if self.box.shape == self.member.shape else f"{self.name}{self.box}"

    @property
    def dtype(self) -> str:
        return self.member.dtype


class Rota:
    """Whose turn it is to write, among ranks that hold the same tensors."""

    def __init__(self) -> None:
        self._loads: Counter[int] = Counter()
        self._turn = 0

    def next(self, holders: Sequence[Piece], size: int) -> Piece:
        if size <= SMALL_BYTES:
            writer = holders[self._turn % len(holders)]
            self._turn += 1
        else:
            writer = min(holders, key=lambda piece: (self._loads[piece.rank], piece.rank))
        self._loads[writer.rank] += size
        return writer


def shares(state: State, roles: Collection[Role] | None = None) -> list[Share]:
    """What this rank writes: its own boxes, and its share of those that others hold too."""
    rotas: dict[tuple[int, ...], Rota] = {}
    found: list[Share] = []
    for name, unit, member in state.members(roles):
        layout = member.layout
        if empty(member.shape):
            first = layout.pieces[0]
            found += [Share(name, unit.name, member, first, whole(member.shape))] if first.rank == state.rank else []
            continue
        if member.role == "local" or len(layout.replicas) == len(layout.pieces):
            found += [Share(name, unit.name, member, piece, piece.box) for piece in held(member, state.rank)]
            continue
        rota = rotas.setdefault(layout.ranks, Rota())  # A2
        for box, pieces in layout.replicas.items():
            holders = pieces[:1] if member.role == "buffer" else pieces  # A1
            for part in _portions(box, len(holders), member.itemsize):
                writer = rota.next(holders, part.cells * member.itemsize)
                if writer.rank == state.rank:
                    found.append(Share(name, unit.name, member, writer, part))
    for share in found:
        share.has_moments = len(state.units[share.unit].members) > 1
    return found


def _portions(box: Box, holders: int, itemsize: int) -> list[Box]:
    if holders < 2 or box.cells * itemsize <= SHARE_BYTES:
        return [box]
    return list(cut(box, max(-(-box.cells // holders), SHARE_BYTES // itemsize)))


def arrange(found: Sequence[Share], last: Collection[str] = ()) -> tuple[bytes, int, int]:
    """Give each share its offset; those named in `last` come at the end.

    Returns the header, where `last` begins, and the size of the whole. Wide cells first, so that all are aligned.
    """
    order = sorted(found, key=lambda share: (share.name in last, -share.member.itemsize, share.name, share.box))
    text = segment_header(order)
    position = len(text)
    border: int | None = None
    for share in order:
        if border is None and share.name in last:
            border = position
        share.offset = position
        position += share.bytes
    return text, position if border is None else border, position


def segment_header(order: Sequence[Share] | Sequence[Entry], room: int = 0) -> bytes:
    """The header of a segment of these boxes, at least `room` bytes."""
    pieces = [(each.label, each.dtype, each.box.shape, each.bytes) for each in order]
    return header(pieces, {"format": "pt", "argosy": "1"}, room)


def copies(share: Share, address: int, arena: int) -> list[Copy]:
    """The copies of a share, chunk by chunk, from `address` (the rank's memory) into the arena."""
    member, piece = share.member, share.piece
    size = member.itemsize
    found: list[Copy] = []
    for box, offset in chunks(share.box, member.dtype, share.offset):
        if box is piece.box:  # All of it at once, as most are.
            source = Spot(address + piece.offset * size, piece.strides)
            found.append(Copy(box, member.shape, size, source, Spot(arena + offset, strides_of(box.shape))))
            continue
        inside = [a - b for a, b in zip(box.start, piece.box.start, strict=True)]
        source = spot(address + piece.offset * size, size, piece.strides, inside)
        found.append(Copy(box, member.shape, size, source, Spot(arena + offset, strides_of(box.shape))))
    return found


def entry(share: Share, sums: list[str], file: str) -> Entry:
    """How the index speaks of a share."""
    return Entry(
        name=share.name,
        key=share.member.key,
        unit=share.unit,
        role=share.member.role,
        kind=share.member.kind,
        dtype=share.member.dtype,
        shape=share.member.shape,
        box=share.box,
        file=file,
        offset=share.offset,
        sums=sums,
    )


def make_index(draft: Draft, entries: list[Entry]) -> Index:
    """The index of what a rank wrote, or had written before."""
    directories = {each.file.partition("/")[0] for each in entries}
    return Index(
        rank=draft.rank,
        step=draft.step,
        shared=draft.shared,
        needs=sorted(directories - {draft.name}),
        bytes=sum(each.bytes for each in entries),
        entries=entries,
        values=draft.values,
        units=draft.units,
    )


def shared_digest(state: State) -> str:
    """What this rank takes to be on all ranks: they must agree on it, or nobody writes what a few of them have."""
    if state.size == 1:
        return ""
    common = (
        f"{name} {member.dtype} {member.shape}"
        for name, _, member in state.members()
        if len(member.layout.ranks) == state.size and member.role != "local"
    )
    return digest("\n".join(common).encode())


class Habits:
    """Which tensors seldom change, learnt from save to save: they come last in the arena, and are often not written."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[str]] = {}
        self._quiet: set[str] | None = None

    def quiet(self, found: Collection[Share]) -> set[str]:
        """The tensors that will probably not have changed since the last save."""
        if self._quiet is not None:
            return self._quiet
        return {share.name for share in found if share.member.role in ("parameter", "buffer") and not share.has_moments}

    def learn(self, entries: Collection[Entry]) -> None:
        """Compare a save with the one before it."""
        now = {(each.name, str(each.box)): each.sums for each in entries if each.bytes}
        if self._sums:
            changed = {key[0] for key, sums in now.items() if self._sums.get(key) != sums}
            self._quiet = {key[0] for key in now} - changed
        self._sums = now


def empty(shape: Sequence[int]) -> bool:
    return prod(shape) == 0
