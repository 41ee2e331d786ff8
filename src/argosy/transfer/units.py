"""What the state of a training consists of: one unit per parameter with all that belongs to it.

U1  A unit is known by its parameter's name, never by an index.
U2  Not yet created is `absent`, a value of its own, not zeros.
U3  A unit moves whole; leaving members out is asked for by role.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

from argosy.core import ConfigError
from argosy.transfer.boxes import has_shared_cells
from argosy.transfer.layout import Layout, Piece, flat_buffer

Role = Literal["parameter", "master", "moment", "step", "rng", "buffer", "local"]
Kind = Literal["same", "blocked", "reduced", "scalar"]
Value = Any
"""What JSON can say: None, bool, int, float, str, lists and string-keyed dicts of these."""

DTYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8, "C128": 16,
}  # fmt: skip
"""Bytes of a cell by its safetensors name; C128 is ours."""
WRAPPED_NOTE = "$wrapped"
"""The option of a unit that says how to rebuild its tensors that consist of other tensors."""


class Member(msgspec.Struct, frozen=True, eq=False):
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


class Unit(msgspec.Struct):
    """A parameter with its master, moments and step, the options of its group, and its other names."""

    name: str
    members: dict[str, Member] = {}
    options: dict[str, Value] = {}
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class State:
    """Everything that a training must not lose, as seen by one of `size` ranks."""

    rank: int = 0
    size: int = 1
    units: dict[str, Unit] = field(default_factory=dict[str, Unit])
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    """What is not a tensor: schedules, counters, cursors."""
    modules: dict[str, str] = field(default_factory=dict[str, str])
    """The keys of the modules, each with what the names of its tensors begin with."""
    fences: list[Callable[[Callable[[], None]], object]] = field(
        default_factory=list[Callable[[Callable[[], None]], object]]
    )
    """Each registers a call to be made before the state next changes (an optimizer's step) and returns its undo."""
    adopt: "Callable[[State], Adoption] | None" = None
    """Prepare this state to receive another; None: only what is there already can be written."""

    def tensors(self) -> dict[str, Any]:
        """This rank's part of every tensor, by its full name."""
        return {name: member.local for name, _, member in self.members() if member.local is not None}

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
    fresh: set[str] = field(default_factory=set[str])
    """Targets in memory that is nobody's before the commit."""
    merged: list[str] = field(default_factory=list[str])
    """Options that were stored of several groups and are one here, found by `commit`: the last of them counts."""


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
    return member.layout.held.get(rank, ())


def is_plain(local: Any) -> bool:
    """Whether a tensor's or array's cells lie in memory of the CPU one after the other, as they are."""
    if hasattr(local, "data_ptr"):
        # A view that is conjugate or negative has other cells than its memory.
        return local.is_cpu and local.is_contiguous() and not local.is_conj() and not local.is_neg()
    return local.flags.c_contiguous


def why_fixed(local: Any) -> str | None:
    """Why a tensor or array cannot be written to, cell by cell; None: it can."""
    if hasattr(local, "data_ptr"):
        is_shared = not local.is_contiguous() and has_shared_cells(local.shape, local.stride())
    elif local.flags.writeable:
        is_shared = has_shared_cells(local.shape, local.strides, local.itemsize)
    else:
        return "it is read-only"
    return "its cells share memory with each other, as those of an expanded tensor do" if is_shared else None
