"""The memory behind a slot of a keeper, and the check of what lies in it."""

import os
from dataclasses import dataclass

import msgspec

from argosy.checkpoint.arena import Arena, content_of
from argosy.checkpoint.format import CorruptShard, Draft, digest, sums_text
from argosy.checkpoint.reading import all_chunks
from argosy.transfer import DTYPES, Copy, Spot, copy_boxes, strides_of


@dataclass(slots=True)
class Held:
    """The memory behind a slot."""

    fd: int
    draft: int = -1
    draft_digest: str = ""
    arena: Arena | None = None

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        else:
            os.close(self.fd)
        if self.draft >= 0:
            os.close(self.draft)


def read_draft(fd: int, expected: str, hop: str) -> Draft:
    """The draft in this memory.

    Raises:
        CorruptShard: it is not what the rank said.
    """
    data = content_of(fd)
    if digest(data) != expected:
        raise CorruptShard(hop, "the index", expected, digest(data))
    return msgspec.json.decode(data, type=Draft)


def verify_arena(draft: Draft, arena: Arena, hop: str) -> None:
    """Sum everything in an arena again.

    Raises:
        CorruptShard: the first box that is not what its rank saved, with the hop.
    """
    chunks = all_chunks(draft.entries)
    sums = copy_boxes(
        Copy(box, entry.shape, DTYPES[entry.dtype], Spot(arena.address + offset, strides_of(box.shape)))
        for entry, box, offset, _ in chunks
    )
    for (entry, box, _, expected), found in zip(chunks, sums, strict=True):
        if sums_text(found) != expected:
            raise CorruptShard(f"{entry.file} {hop}", f"{entry.name}{box}", expected, sums_text(found))
