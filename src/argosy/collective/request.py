"""How a rank describes the collective that it calls, and the error text if the descriptions differ. Pure.

A head has 128 bytes: 32 that must be the same on all ranks (kind, element type, reduction, root, number of the
collective in its group), 16 of name, 80 of call site. In shared memory the sizes that a rank sends to and receives
from each other rank follow it; the engine compares those, too.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum

import msgspec
import torch

from argosy._exchange import ELEMENTS
from argosy.core import ArgosyError, format_ranks

_HEAD = struct.Struct("<BBBxiQ16x16s80s")
HEAD_BYTES = _HEAD.size
assert HEAD_BYTES == 128

REDUCIBLE: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in ELEMENTS)
"""Element types that the engine can reduce."""

_OTHERS = (
    torch.bool,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODES = {dtype: code for code, dtype in enumerate(REDUCIBLE + _OTHERS)}
_NAMES = [str(dtype).removeprefix("torch.") for dtype in REDUCIBLE + _OTHERS]
_REDUCTIONS = ("sum", "average", "product", "minimum", "maximum", "and", "or", "xor")
UNKNOWN_DTYPE = 255


class Kind(IntEnum):
    """The patterns in which bytes move; every operation uses one of them."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_TO_ALL = 2
    ALL_GATHER = 3
    BROADCAST = 4


class CollectiveMismatch(ArgosyError):
    """The ranks of a group called different collectives, or the same with different arguments."""


class Request(msgspec.Struct, frozen=True):
    """One rank's description of a collective."""

    kind: int
    name: str
    dtype: int = 5
    reduction: int = 0
    root: int = -1
    number: int = 0
    site: str = ""

    def pack(self, number: int, site: str) -> bytes:
        """Return the head of collective number `number` of its group, called at `site`."""
        name, place = self.name.encode()[:16], site.encode()[-80:]
        return _HEAD.pack(self.kind, self.dtype, self.reduction, self.root, number, name, place)

    @classmethod
    def unpack(cls, raw: bytes) -> "Request":
        kind, dtype, reduction, root, number, name, site = _HEAD.unpack_from(raw)
        return cls(kind, _text(name), dtype, reduction, root, number, _text(site))

    def __str__(self) -> str:
        kind = f" of {_NAMES[self.dtype]}" if self.dtype < len(_NAMES) and self.name != "barrier" else ""
        how = f" by {_REDUCTIONS[self.reduction]}" if 0 < self.reduction < len(_REDUCTIONS) else ""
        root = f" with root {self.root}" if self.root >= 0 else ""
        return f"{self.name} #{self.number}{kind}{how}{root}" + (f" at {self.site}" if self.site else "")


def dtype_code(dtype: torch.dtype) -> int:
    """Return the number of an element type; unknown ones share one number."""
    return _CODES.get(dtype, UNKNOWN_DTYPE)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")[:16]


def explain_mismatch(wanted: Mapping[int, tuple[Request, tuple[int, ...]]]) -> str:
    """Say which ranks called what, with which sizes; ranks that agree are named together."""
    groups: dict[str, list[int]] = {}
    for rank, (request, sizes) in wanted.items():
        shape = "" if not any(sizes) else f", {_sizes(sizes)} bytes"
        groups.setdefault(f"{request}{shape}", []).append(rank)
    said = [f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}: {what}" for what, ranks in groups.items()]
    return "ranks called different collectives: " + "; ".join(said)


def _sizes(sizes: tuple[int, ...]) -> str:
    """Describe the sizes sent to and received from each rank: one number if all are equal."""
    half = len(sizes) // 2
    sent, received = sizes[:half], sizes[half:]
    if len(set(sizes)) == 1:
        return str(sizes[0])
    return f"sends {list(sent)} receives {list(received)}"


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
