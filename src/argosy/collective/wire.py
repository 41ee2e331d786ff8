"""How a rank describes the collective it wants, and what is said when the descriptions differ.

Pure. A head is 128 bytes: 32 that must be the same on all ranks (kind, element type, reduction, form of the
operation, root, number of the collective in its group), 16 of name, 80 of call site. The lengths of what each
rank sends to and receives from each other follow it in shared memory; the engine compares those too.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum

import msgspec
import torch

from argosy.core import ArgosyError, format_ranks

_HEAD = struct.Struct("<BBBxiQ16x16s80s")
HEAD_BYTES = _HEAD.size
assert HEAD_BYTES == 128

REDUCIBLE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
"""Element types with arithmetic of their own, in the order of native/src/reduce.rs."""

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
    """The ways in which bytes move; every operation is one of them."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_TO_ALL = 2
    ALL_GATHER = 3
    BROADCAST = 4


class CollectiveMismatch(ArgosyError):
    """The ranks of a group called different collectives, or the same with different arguments."""


class Wish(msgspec.Struct, frozen=True):
    """What one rank wants of its group."""

    kind: int
    name: str
    dtype: int = 5
    reduction: int = 0
    root: int = -1
    number: int = 0
    site: str = ""

    def pack(self, number: int, site: str) -> bytes:
        """As the collective `number` of its group, called at `site`."""
        name, place = self.name.encode()[:16], site.encode()[-80:]
        return _HEAD.pack(self.kind, self.dtype, self.reduction, self.root, number, name, place)

    @classmethod
    def unpack(cls, raw: bytes) -> "Wish":
        kind, dtype, reduction, root, number, name, site = _HEAD.unpack_from(raw)
        return cls(kind, _text(name), dtype, reduction, root, number, _text(site))

    def __str__(self) -> str:
        kind = f" of {_NAMES[self.dtype]}" if self.dtype < len(_NAMES) and self.name != "barrier" else ""
        how = f" by {_REDUCTIONS[self.reduction]}" if 0 < self.reduction < len(_REDUCTIONS) else ""
        root = f" with root {self.root}" if self.root >= 0 else ""
        return f"{self.name} #{self.number}{kind}{how}{root}" + (f" at {self.site}" if self.site else "")


def dtype_code(dtype: torch.dtype) -> int:
    """The number of an element type; all that are unknown share one."""
    return _CODES.get(dtype, UNKNOWN_DTYPE)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")[:16]


def explain(wanted: Mapping[int, tuple[Wish, tuple[int, ...]]]) -> str:
    """Say which ranks wanted what, with which lengths; those that agree together."""
    groups: dict[str, list[int]] = {}
    for rank, (wish, sizes) in wanted.items():
        shape = "" if not any(sizes) else f", {_sizes(sizes)} bytes"
        groups.setdefault(f"{wish}{shape}", []).append(rank)
    said = [f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}: {what}" for what, ranks in groups.items()]
    return "ranks called different collectives: " + "; ".join(said)


def _sizes(sizes: tuple[int, ...]) -> str:
    """Lengths sent to and received from each rank; one number where they are all the same."""
    half = len(sizes) // 2
    sent, received = sizes[:half], sizes[half:]
    if len(set(sizes)) == 1:
        return str(sizes[0])
    return f"sends {list(sent)} receives {list(received)}"


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
