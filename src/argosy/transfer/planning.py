"""Plan the copies that turn one layout into another: byte-minimal, spread over replicas, the same on every rank. Pure.

P1  Every cell of every destination piece is written exactly once.
P2  A cell that the destination's rank holds is taken from there; the rest is the lower bound, and is what is sent.
P3  The plan is a function of the layouts alone.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache

import msgspec

from argosy.core import ConfigError
from argosy.transfer.blocks import Blocking, Blocks, UnalignedBlocks
from argosy.transfer.boxes import Box, cut
from argosy.transfer.layout import Layout, Piece, replicated
from argosy.transfer.mapping import Remap, seen_from_destination
from argosy.transfer.units import State

CHUNK_BYTES = 8 << 20


class Tensor(msgspec.Struct, frozen=True):
    """What a side of a plan knows of a tensor: its layout, the bytes of a cell, and of scales, where the blocks are."""

    layout: Layout
    itemsize: int
    dtype: str = ""
    blocking: Blocking | None = None


class Move(msgspec.Struct, frozen=True):
    """Copy `box` from a piece to a piece; within a rank when both name the same."""

    box: Box
    source: Piece
    destination: Piece


class Transfer(msgspec.Struct, frozen=True):
    """A move of one named tensor."""

    name: str
    itemsize: int
    move: Move

    @property
    def bytes(self) -> int:
        return self.move.box.cells * self.itemsize


class Anew(msgspec.Struct, frozen=True):
    """Scales that a destination has for other blocks: old ones go to it whole, and values are quantised anew there."""

    old: Blocking
    new: Blocking
    codes: str
    layout: Layout
    """That of the codes, at the destination."""
    book: str
    """The tensor that has the values of the codes, if that is one."""


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """A plan in numbers; `str()` of it is for a person."""

    tensors: int
    moves: int
    bytes_local: int
    bytes_sent: int
    bytes_bound: int
    bytes_same_host: int
    staging_bytes: int
    predicted_s: float
    links: list[tuple[int, int, int]]
    """(from rank, to rank, bytes), the largest first."""
    requantised: list[str]
    """Scales whose values are quantised anew, which is not exact."""

    def __str__(self) -> str:
        lines = [
            f"{self.tensors} tensors in {self.moves} moves: {self.bytes_sent:,} bytes sent "
            f"(lower bound {self.bytes_bound:,}; {self.bytes_same_host:,} within a host), {self.bytes_local:,} local",
            f"staging {self.staging_bytes:,} bytes; predicted {self.predicted_s:.3f} s",
        ]
        lines += [f"  rank {a} -> rank {b}: {n:,} bytes" for a, b, n in self.links[:16]]
        if len(self.links) > 16:
            lines.append(f"  … and {len(self.links) - 16} more pairs")
        if self.requantised:
            lines.append(f"quantised anew, not exact: {', '.join(self.requantised)}")
        return "\n".join(lines)


class Plan(msgspec.Struct, frozen=True):
    """All moves, by template: tensors of equal layouts share theirs."""

    moves: dict[str, tuple[Move, ...]]
    itemsizes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    staging_bytes: int
    bytes_bound: int = 0
    """What ranks need and do not hold: no plan sends less."""
    host_of: Callable[[int], int] = lambda rank: rank
    requantised: dict[str, Anew] = {}

    def transfers(self, rank: int | None = None) -> Iterator[Transfer]:
        """What moves, in the order of sending, no message larger than the staging allows; of one rank if given."""
        for name, moves in self.moves.items():
            size = self.itemsizes[name]
            limit = max(1, min(CHUNK_BYTES, self.staging_bytes // 4) // size)
            for move in moves:
                if rank is None or rank in (move.source.rank, move.destination.rank):
                    for box in cut(move.box, limit):
                        yield Transfer(name, size, Move(box, move.source, move.destination))

    def explain(self, bytes_per_s: float = 1e9) -> Explained:
        """Who sends what, against the lower bound; the time is that of the busiest rank at `bytes_per_s`."""
        links: Counter[tuple[int, int]] = Counter()
        count = 0
        for name, moves in self.moves.items():
            count += len(moves)
            for move in moves:
                links[move.source.rank, move.destination.rank] += move.box.cells * self.itemsizes[name]
        sent = {pair: n for pair, n in links.items() if pair[0] != pair[1]}
        busiest: Counter[int] = Counter()
        for (a, b), n in sent.items():
            busiest[a] += n
            busiest[b] += n
        total = sum(sent.values())
        return Explained(
            tensors=len(self.moves),
            moves=count,
            bytes_local=sum(links.values()) - total,
            bytes_sent=total,
            bytes_bound=self.bytes_bound,
            bytes_same_host=sum(n for (a, b), n in sent.items() if self.host_of(a) == self.host_of(b)),
            staging_bytes=self.staging_bytes,
            predicted_s=max(busiest.values(), default=0) / bytes_per_s,
            links=sorted(((a, b, n) for (a, b), n in sent.items()), key=lambda link: (-link[2], link)),
            requantised=sorted(self.requantised),
        )


class Uncovered(ConfigError):
    """A destination tensor would be left without a value, or a source tensor without a destination."""


def reshard(
    source: Mapping[str, Tensor] | State,
    destination: Mapping[str, Tensor] | State,
    *,
    keep: Collection[str] = (),
    remap: Remap | None = None,
    requantize: bool = False,
    staging_bytes: int = 64 << 20,
    host_of: Callable[[int], int] = lambda rank: rank,
) -> Plan:
    """Plan how the tensors of `source` become those of `destination`; `keep` names destinations to leave alone.

    Each side is a state, as `describe` gives it, or tensors by name.

    `remap` says which source tensors go under another name, are split, fused, stacked or transposed on their way.
    A rank that carries the plan out holds at most `staging_bytes` on their way (`move`). With `requantize` values that
    have other blocks at the destination are quantised anew.

    Raises:
        Uncovered: a name is missing on one side, or the source does not hold every cell.
        UnalignedBlocks: blocks differ, and `requantize` is not asked for or nobody says what codes mean.
        ConfigError: shapes or sizes of cells differ.
    """
    source, destination = _side(source), _side(destination)
    if remap is not None:
        source = remapped(source, remap)
    missing = sorted(set(destination) - set(source) - set(keep))
    if missing:
        raise Uncovered(f"not in the source: {', '.join(missing[:5])}", hint="name them in keep=, or rename")
    unmatched = sorted(set(source) - set(destination))
    if unmatched:
        raise Uncovered(f"not in the destination: {', '.join(unmatched[:5])}")
    requantised = _requantised(source, destination, keep, requantize=requantize)
    destination = {**destination, **{name: _old_scales(source[name], destination[name]) for name in requantised}}
    moves: dict[str, tuple[Move, ...]] = {}
    for index, name in enumerate(sorted(set(destination) - set(keep))):
        old, new = source[name], destination[name]
        if old.layout.shape != new.layout.shape or old.itemsize != new.itemsize:
            raise ConfigError(
                f"{name}: {old.dtype}{list(old.layout.shape)} does not fit {new.dtype}{list(new.layout.shape)}"
            )
        replicas = max((len(pieces) for pieces in old.layout.replicas.values()), default=1)
        moves[name] = overlaps(old.layout, new.layout, index % replicas, host_of)
    return Plan(
        moves=moves,
        itemsizes={name: destination[name].itemsize for name in moves},
        shapes={name: destination[name].layout.shape for name in moves},
        staging_bytes=staging_bytes,
        bytes_bound=sum(
            missing_cells(source[name].layout, destination[name].layout) * destination[name].itemsize for name in moves
        ),
        host_of=host_of,
        requantised=requantised,
    )


def _side(tensors: Mapping[str, Tensor] | State) -> Mapping[str, Tensor]:
    if not isinstance(tensors, State):
        return tensors
    return {
        name: Tensor(member.layout, member.itemsize, member.dtype, member.blocking)
        for name, _, member in tensors.members()
    }


def _requantised(
    source: Mapping[str, Tensor], destination: Mapping[str, Tensor], keep: Collection[str], *, requantize: bool
) -> dict[str, Anew]:
    """The scales whose blocks differ."""
    found: dict[str, Anew] = {}
    for name in sorted(set(destination) - set(keep)):
        old, new = source[name].blocking, destination[name].blocking
        if old is None or new is None or old.is_as(new):
            continue
        unit, blocks = name.partition("::")[0], new.blocks
        codes = f"{unit}::{blocks.codes}"
        is_said = codes in destination and _is_said(unit, blocks, destination[codes], destination)
        if not requantize or old.shape != new.shape or not is_said:
            raise UnalignedBlocks(
                f"{name} has other blocks at the destination, of {new.size} cells after {old.size}",
                hint="choose cuts at multiples of the block, or pass requantize=True and say what codes mean",
            )
        book = f"{unit}::{blocks.book}" if blocks.book and isinstance(blocks.book, str) else ""
        found[name] = Anew(old, new, codes, destination[codes].layout, book)
    return found


def _is_said(unit: str, blocks: Blocks, codes: Tensor, destination: Mapping[str, Tensor]) -> bool:
    """Whether each code has a value: in a book, in a tensor, or as the number that it is."""
    if isinstance(blocks.book, str) and blocks.book:
        book = destination.get(f"{unit}::{blocks.book}")
        return book is not None and book.layout.shape == (1 << 8 * codes.itemsize,)
    return blocks.has_all(codes.itemsize) if blocks.book else blocks.is_said(codes.dtype)


def _old_scales(old: Tensor, new: Tensor) -> Tensor:
    """Those that are needed to understand codes: all, on each rank that gets any."""
    return Tensor(replicated(old.layout.shape, new.layout.ranks), old.itemsize, old.dtype)


def remapped(source: Mapping[str, Tensor], remap: Remap) -> dict[str, Tensor]:
    """The source under the names and in the index spaces of the destination."""
    made = remap.made({name: tensor.layout.shape for name, tensor in source.items()})
    layouts = {name: tensor.layout for name, tensor in source.items()}
    found: dict[str, Tensor] = {}
    for name, each in made.items():
        kinds = {(source[part.source].itemsize, source[part.source].dtype) for part in each.parts}
        if len(kinds) != 1:
            raise ConfigError(f"{name} would be made of tensors of different dtypes")
        found[name] = Tensor(seen_from_destination(each, layouts), *kinds.pop())
    return found


@lru_cache(maxsize=4096)
def missing_cells(source: Layout, destination: Layout) -> int:
    """The cells that destination ranks need and do not hold, counted from the layouts alone."""
    total = 0
    for rank, pieces in destination.by_rank.items():
        own = [piece.box for piece in source.by_rank.get(rank, ())]
        for needed in dict.fromkeys(piece.box for piece in pieces):
            missing = [needed] if needed.cells else []
            for box in own:
                missing = [part for old in missing for part in old - box]
            total += sum(part.cells for part in missing)
    return total


def _own_host(rank: int) -> int:
    return rank


@lru_cache(maxsize=4096)
def overlaps(
    source: Layout, destination: Layout, turn: int = 0, host_of: Callable[[int], int] = _own_host
) -> tuple[Move, ...]:
    """The moves of one tensor; `turn` spreads the sending among replicas.

    Raises:
        Uncovered: the source does not hold every cell that the destination needs.
    """
    index = _Index(source)
    moves: list[Move] = []
    sent = 0
    for piece in destination.pieces:
        missing = [piece.box] if piece.box.cells else []
        found = index.near(piece.box) if missing else []
        held = {box for box, pieces in found if any(p.rank == piece.rank for p in pieces)}
        for box, pieces in sorted(found, key=lambda item: item[0] not in held):
            own = next((p for p in pieces if p.rank == piece.rank), None)
            near = [p for p in pieces if host_of(p.rank) == host_of(piece.rank)] or list(pieces)
            for part in list(missing):
                common = part & box
                if common is None:
                    continue
                sender = own or near[(turn + sent) % len(near)]
                sent += own is None
                moves.append(Move(common, sender, piece))
                missing.remove(part)
                missing += part - common
            if not missing:
                break
        if missing:
            raise Uncovered(f"nobody holds {missing[0]} of a tensor of shape {list(source.shape)}")
    return tuple(moves)


class _Index:
    """The distinct boxes of a layout, sorted along the dimension that cuts it most."""

    def __init__(self, layout: Layout) -> None:
        boxes = layout.replicas
        dims = range(len(layout.shape))
        self.dim = max(dims, key=lambda d: len({box.start[d] for box in boxes}), default=None)
        dim = self.dim
        self.items = sorted(boxes.items(), key=lambda item: item[0].start[dim] if dim is not None else 0)
        self.starts = [box.start[dim] for box, _ in self.items] if dim is not None else []
        self.longest = max((box.shape[dim] for box, _ in self.items), default=0) if dim is not None else 0

    def near(self, box: Box) -> list[tuple[Box, tuple[Piece, ...]]]:
        """The boxes that have cells in common with `box`."""
        if self.dim is None:
            return self.items
        first = bisect_left(self.starts, box.start[self.dim] - self.longest + 1)
        last = bisect_left(self.starts, box.stop[self.dim])
        return [(other, pieces) for other, pieces in self.items[first:last] if other & box]
