"""What the state of a training consists of: one unit per parameter with all that belongs to it.

U1  A unit is known by its parameter's name, never by an index.
U2  Not yet created is `absent`, a value of its own, not zeros.
U3  A unit moves whole; leaving members out is asked for by role.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from argosy.core import ConfigError
from argosy.transfer.boxes import flat_boxes, strides_of, whole
from argosy.transfer.layout import Layout, Piece, Range, flat, flat_buffer

Role = Literal["parameter", "master", "moment", "step", "rng", "buffer", "local"]
Kind = Literal["same", "blocked", "reduced", "scalar"]
Value = Any
"""What JSON can say: None, bool, int, float, str, lists and string-keyed dicts of these."""

DTYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8, "C128": 16,
}  # fmt: skip
"""Bytes of a cell by its safetensors name; C128 is ours."""


class UnalignedBlocks(ConfigError):
    """A cut falls inside a block of quantised values."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One tensor of a unit: how it is laid out over ranks, and this rank's part of it.

    `local` is a torch tensor or numpy array whose memory the pieces of this rank index; None where the rank
    holds nothing. It must be contiguous.
    """

    key: str
    role: Role
    dtype: str
    layout: Layout
    local: Any = None
    kind: Kind = "same"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape


@dataclass(slots=True)
class Unit:
    """A parameter with its master, moments and step, the options of its group, and its other names."""

    name: str
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    options: dict[str, Value] = field(default_factory=dict[str, Value])
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class State:
    """Everything that a training must not lose, as seen by one of `size` ranks."""

    rank: int = 0
    size: int = 1
    units: dict[str, Unit] = field(default_factory=dict[str, Unit])
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    """What is not a tensor: schedules, counters, cursors."""
    fences: list[Callable[[Callable[[], None]], object]] = field(
        default_factory=list[Callable[[Callable[[], None]], object]]
    )
    """Each registers a call to be made before the state next changes (an optimizer's step) and returns its undo."""
    adopt: "Callable[[State], Adoption] | None" = None
    """Prepare this state to receive another; None: only what is there already can be written."""

    def members(self, roles: Collection[Role] | None = None) -> Iterator[tuple[str, Unit, Member]]:
        """Every member with its full name, in order of names."""
        for name in sorted(self.units):
            unit = self.units[name]
            for key in sorted(unit.members):
                if roles is None or unit.members[key].role in roles:
                    yield full_name(name, key), unit, unit.members[key]


@dataclass(slots=True)
class Adoption:
    """How a live state takes over a stored one: tensors to be filled, then `commit` makes them the live ones."""

    targets: dict[str, Member]
    commit: Callable[[], None]
    kept: list[str] = field(default_factory=list[str])
    """Live tensors that the stored state does not have."""
    unused: list[str] = field(default_factory=list[str])
    """Stored tensors that have no place here."""
    bare: list[str] = field(default_factory=list[str])
    """Parameters that an optimizer has here, and that were stored without one: their moments would begin anew."""


def checked_roles(roles: Collection[str] | None) -> None:
    """See to it that roles are known ones.

    Raises:
        ConfigError: one is not.
    """
    known = get_args(Role)
    wrong = (
        [] if roles is None else [roles] if isinstance(roles, str) else [each for each in roles if each not in known]
    )
    if wrong:
        raise ConfigError(f"not a set of roles: {wrong[0]!r}", hint=f"the roles are {', '.join(known)}")


def full_name(unit: str, key: str) -> str:
    """`layer.weight` for the parameter itself, `layer.weight::exp_avg` for what belongs to it."""
    return unit if key in ("parameter", "value") else f"{unit}::{key}"


def role_of(key: str, shape: tuple[int, ...]) -> Role:
    """The role of an optimizer's tensor, by its key."""
    if key == "step":
        return "step"
    return "master" if "master" in key else "moment"


def kind_of(shape: tuple[int, ...], parameter: tuple[int, ...]) -> Kind:
    """How an optimizer's tensor relates to its parameter, by its shape."""
    if shape == parameter:
        return "same"
    return "scalar" if shape == () else "reduced"


def blocked(layout: Layout, block: int) -> Layout:
    """The layout of one value per `block` cells of a tensor that is cut as `layout`.

    Raises:
        UnalignedBlocks: a cut does not fall on the border of a block.
    """
    cells = whole(layout.shape).cells
    count = -(-cells // block)
    ranges: list[Range] = []
    for rank in layout.ranks:
        offset = 0
        for first, last in flat_ranges(layout, rank):
            if first % block or (last % block and last != cells):
                raise UnalignedBlocks(
                    f"blocks of {block} cells are cut at {first}:{last} of {cells} on rank {rank}",
                    hint="choose ranks or shard sizes that are multiples of the block",
                )
            size = -(-last // block) - first // block
            ranges.append(Range(rank, first // block, first // block + size, offset))
            offset += size
    return flat((count,), ranges)


def flat_ranges(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """The cells that a rank holds as ranges of the row-major order, joined where they touch.

    Raises:
        UnalignedBlocks: they are so many small ranges that blocks make no sense.
    """
    strides = strides_of(layout.shape)
    ranges: list[tuple[int, int]] = []
    for piece in layout.by_rank.get(rank, ()):
        if not piece.box.cells:
            continue
        first = sum(a * s for a, s in zip(piece.box.start, strides, strict=True))
        if flat_boxes(layout.shape, first, first + piece.box.cells) != [piece.box]:
            raise UnalignedBlocks(f"{piece.box} of {list(layout.shape)} is not contiguous, so blocks cross its border")
        if ranges and ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], first + piece.box.cells)
        else:
            ranges.append((first, first + piece.box.cells))
    return ranges


def flat_members(
    shapes: Mapping[str, tuple[int, ...]], buffers: Mapping[str, tuple[Role, str, Any]], ranks: int, *, align: int = 1
) -> dict[str, dict[str, Member]]:
    """Members of ZeRO's flat buffers, by parameter then key.

    `buffers` maps a key (`exp_avg`) to (role, dtype, this rank's part). The tensors of `shapes` lie in them one after
    the other, padded at the end and cut into `ranks` equal parts.
    """
    layouts = flat_buffer(shapes, ranks, align=align)
    return {
        name: {key: Member(key, role, dtype, layout, local) for key, (role, dtype, local) in buffers.items()}
        for name, layout in layouts.items()
    }


def held(member: Member, rank: int) -> tuple[Piece, ...]:
    """The pieces of a rank that have cells."""
    return tuple(piece for piece in member.layout.by_rank.get(rank, ()) if piece.box.cells)
