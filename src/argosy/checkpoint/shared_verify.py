"""Ranks of one host that restore the same step verify each chunk once, for all of them.

H1  What a rank needs follows from layouts that all who share know, so each chunk has exactly one rank that verifies it.
H2  They read through the page cache: what one has verified the others find there when they fill their tensors.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from argosy.checkpoint.format import Entry, digest
from argosy.checkpoint.step_index import Chunk
from argosy.fabric import host_id
from argosy.transfer import CHUNK_BYTES, Layout, Member, held

Exchange = Callable[[str], list[str]]
"""Tell all ranks something, and hear what each of them says."""


def reads_of(place: str, entries: Sequence[Entry], targets: Mapping[str, Member]) -> str:
    """A digest of what each rank reads. Only ranks with equal digests share the verifying."""
    known: dict[int, str] = {}

    def text(layout: Layout) -> str:
        if id(layout) not in known:
            pieces = [(each.rank, each.box) for each in layout.pieces]
            known[id(layout)] = digest(msgspec.json.encode(pieces))
        return known[id(layout)]

    lines = [f"{each.file} {each.offset} {each.name} {text(targets[each.name].layout)}" for each in entries]
    return digest("\n".join([place, *lines]).encode())


def sharing_ranks(exchange: Exchange, rank: int, reads: str) -> list[int]:
    """The ranks of this host that read the same, this one included; all ranks call it, some with nothing to read."""
    mine = f"{host_id()} {reads}"
    answers = exchange(mine)
    alike = [other for other, answer in enumerate(answers) if answer == mine]
    return alike if reads and len(alike) > 1 else [rank]


def verified_by(rank: int, wanted: Sequence[Chunk], targets: Mapping[str, Member], ranks: Sequence[int]) -> list[Chunk]:
    """The chunks of `wanted` that this rank verifies: of `targets` its share, of others all."""
    mine: list[Chunk] = []
    for chunk in wanted:
        entry, box, offset, _ = chunk
        member = targets.get(entry.name)
        pieces = {other: held(member, other) for other in ranks} if member is not None else {}
        needing = [other for other in pieces if any(piece.box & box is not None for piece in pieces[other])]
        # Neighbours in a file go to the same rank, in reads as large as without others.
        if not needing or needing[offset // CHUNK_BYTES % len(needing)] == rank:
            mine.append(chunk)
    return mine
