"""Decide which rank writes which box, and where each lies in its segment. Pure, and the same on every rank.

A1  Buffers may differ between ranks (BatchNorm's do): all that are replicated are the first rank's, never some of each.
A2  Who writes a box depends only on tensors that all its holders have: ranks with different parts of a model, as in a
    pipeline, decide alike, so each box is written by exactly one of them.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from argosy.checkpoint.format import Draft, Entry, Index, digest, header
from argosy.transfer import (
    DTYPES,
    Box,
    Copy,
    Layout,
    Member,
    Piece,
    Role,
    Spot,
    State,
    Table,
    Unit,
    cut,
    held,
    spot_in,
    strides_of,
    table_of,
    whole,
)

SHARE_BYTES = 64 << 20
"""A replicated box larger than this is written by its holders together."""
SUMS_DIGITS = 32
AT_ONCE = ("buffer", "local", "step", "rng")
"""Roles that may change in the next forward, before any fence."""
SMALL_BYTES = 64 << 10
"""Those up to this size (steps, biases) go to the holders in turn, however much they write: that is decided at once."""


class Share(NamedTuple):
    """One box that this rank writes, and where it lies in the tensor's memory."""

    entry: Entry
    """How the index will speak of it; its place in the file and its sums are not known yet."""
    piece: Piece
    has_moments: bool
    is_trained: bool

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_frozen(self) -> bool:
        """Whether it probably does not change: nothing trains it."""
        return self.entry.role in ("parameter", "buffer") and not self.has_moments


def _share(name: str, unit: Unit, member: Member, piece: Piece, box: Box) -> Share:
    entry = Entry(
        name=name,
        key=member.key,
        unit=unit.name,
        role=member.role,
        kind=member.kind,
        dtype=member.dtype,
        shape=member.shape,
        box=box,
        file="",
        offset=0,
        sums=[],
    )
    return Share(entry, piece, len(unit.members) > 1, "optimizer" in unit.options)


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
            found += [_share(name, unit, member, first, whole(member.shape))] if first.rank == state.rank else []
            continue
        if member.role == "local" or len(layout.replicas) == len(layout.pieces):
            found += [_share(name, unit, member, piece, piece.box) for piece in held(member, state.rank)]
            continue
        rota = rotas.setdefault(layout.ranks, Rota())  # A2
        for box, pieces in layout.replicas.items():
            holders = pieces[:1] if member.role == "buffer" else pieces  # A1
            for part in _portions(box, len(holders), member.itemsize):
                writer = rota.next(holders, part.cells * member.itemsize)
                if writer.rank == state.rank:
                    found.append(_share(name, unit, member, writer, part))
    return found


def _portions(box: Box, holders: int, itemsize: int) -> list[Box]:
    if holders < 2 or box.cells * itemsize <= SHARE_BYTES:
        return [box]
    return list(cut(box, max(-(-box.cells // holders), SHARE_BYTES // itemsize)))


class Form(NamedTuple):
    """All that an arrangement depends on: states of one form are arranged alike."""

    rank: int
    size: int
    members: list[tuple[str, bool, str, str, str, str, Layout]]
    roles: frozenset[Role] | None
    quiet: set[str] | None


def form_of(state: State, roles: Collection[Role] | None = None, quiet: set[str] | None = None) -> Form:
    """The form of a state of which `roles` are saved, and `quiet` are the tensors that seldom change, if known."""
    members = [
        (name, "optimizer" in unit.options, key, each.role, each.dtype, each.kind, each.layout)
        for name, unit in state.units.items()
        for key, each in unit.members.items()
    ]
    return Form(state.rank, state.size, members, None if roles is None else frozenset(roles), quiet)


class Arrangement:
    """Where each box that this rank writes lies in its segment, for all saves of states of one form.

    Those that seldom change come last. Wide cells come first, so that all are aligned.
    """

    def __init__(self, state: State, form: Form | None = None) -> None:
        self.form = form = form or form_of(state)
        found = shares(state, form.roles)
        last = form.quiet if form.quiet is not None else {share.name for share in found if share.is_frozen}
        found.sort(key=lambda each: (each.name in last, -DTYPES[each.entry.dtype], each.name, each.entry.box))
        self.header, self.shared = segment_header([each.entry for each in found]), shared_digest(state)
        self.size = len(self.header)
        self.shares: list[Share] = []
        for each in found:
            self.shares.append(each._replace(entry=msgspec.structs.replace(each.entry, offset=self.size)))
            self.size += each.entry.bytes
        self.border = next((each.entry.offset for each in self.shares if each.name in last), self.size)
        counts = self._counts = [len(each.entry.chunks()) for each in self.shares]
        self.share_of = np.repeat(np.arange(len(counts)), counts)
        """By chunk."""

    def tensors(self, state: State) -> list[Any]:
        """This rank's part of the tensor of each share, in a state of this form."""
        return [state.units[share.entry.unit].members[share.entry.key].local for share in self.shares]

    @cached_property
    def _table(self) -> Table:
        """The copies of all chunks, as if every tensor and the arena began at 0."""
        return table_of(copy for share in self.shares for copy in copies(share))

    def table(self, addresses: Sequence[int], arena: int) -> Table:
        """The copies of all chunks into an arena, in its order; `addresses` are where the shares' tensors begin."""
        sources = np.array(addresses, "<i8")[self.share_of]
        return self._table.moved(np.repeat(sources, self._table.counts), arena)

    @cached_property
    def at_once(self) -> NDArray[np.bool_]:
        """The chunks that may change before the fence, so they are copied before `save` returns: of buffers and the
        like, and of parameters that no optimizer here steps (an average of weights), unless they seldom change."""
        quiet = self.form.quiet or ()
        now = [s.entry.role in AT_ONCE or not (s.is_trained or s.name in quiet) for s in self.shares]
        return np.array(now, bool)[self.share_of]

    @cached_property
    def doubtful(self) -> NDArray[np.bool_]:
        """The chunks that no fence protects."""
        return np.array([not share.is_trained for share in self.shares], bool)[self.share_of]

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Where in the arena each chunk begins."""
        return self._table.rows[np.cumsum(self._table.counts) - self._table.counts, 1]

    def named(self, chunk: int) -> str:
        share = self.shares[int(self.share_of[chunk])]
        return f"{share.name}{share.entry.box}"

    def entries(self, sums: NDArray[np.uint64], file: str) -> list[Entry]:
        """How the index speaks of all shares; `sums` are those of all chunks."""
        text = sums.astype(">u8").tobytes().hex()
        texts = [text[at : at + SUMS_DIGITS] for at in range(0, len(text), SUMS_DIGITS)]
        found: list[Entry] = []
        position = 0
        for share, count in zip(self.shares, self._counts, strict=True):
            sums_of = texts[position : position + count]
            found.append(msgspec.structs.replace(share.entry, file=file, sums=sums_of))
            position += count
        return found


def segment_header(order: Sequence[Entry], room: int = 0) -> bytes:
    """The header of a segment of these boxes, at least `room` bytes."""
    pieces = [(each.label, each.dtype, each.box.shape, each.bytes) for each in order]
    return header(pieces, {"format": "pt", "argosy": "1"}, room)


def copies(share: Share) -> list[Copy]:
    """The copies of a share, chunk by chunk, as if its tensor and the arena began at 0."""
    one, size = share.entry, DTYPES[share.entry.dtype]
    return [
        Copy(box, one.shape, size, spot_in(share.piece, 0, size, box.start), Spot(offset, strides_of(box.shape)))
        for box, offset in one.chunks()
    ]


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
        modules=draft.modules,
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
        self._sums: dict[tuple[str, Box], list[str]] = {}
        self.quiet: set[str] | None = None
        """The tensors that will probably not have changed since the last save; None: nobody knows yet."""

    def learn(self, entries: Collection[Entry]) -> None:
        """Compare a save with the one before it."""
        now = {(each.name, each.box): each.sums for each in entries if each.sums}
        if self._sums:
            changed = {key[0] for key, sums in now.items() if self._sums.get(key) != sums}
            self.quiet = {key[0] for key in now} - changed
        self._sums = now


def empty(shape: Sequence[int]) -> bool:
    return prod(shape) == 0
