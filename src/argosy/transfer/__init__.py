"""Tensors on the move: layouts, plans, digests, and what the state of a training consists of."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy
from argosy.transfer.boxes import Box, cut, flat_boxes, strides_of, whole
from argosy.transfer.copying import (
    ZERO,
    Copy,
    Progress,
    Spot,
    Sums,
    add,
    copy_boxes,
    finish,
    rows_of,
    spot,
)
from argosy.transfer.layout import (
    Layout,
    Piece,
    Placement,
    Range,
    Split,
    flat,
    flat_buffer,
    from_safetensors,
    replicated,
    sharded,
)
from argosy.transfer.mapping import (
    Fused,
    Made,
    Remap,
    Renamed,
    SplitUp,
    Stacked,
    Transposed,
    parts_by_source,
    seen_from_source,
)
from argosy.transfer.planning import CHUNK_BYTES, Explained, Move, Plan, Tensor, Transfer, Uncovered, overlaps, reshard
from argosy.transfer.units import (
    DTYPES,
    Adoption,
    Kind,
    Member,
    Role,
    State,
    UnalignedBlocks,
    Unit,
    Value,
    blocked,
    checked_roles,
    flat_members,
    flat_ranges,
    full_name,
    held,
    role_of,
)

if TYPE_CHECKING:
    from argosy.transfer.sending import CorruptTransfer as CorruptTransfer
    from argosy.transfer.sending import Moved as Moved
    from argosy.transfer.sending import move as move
    from argosy.transfer.torch_state import describe as describe
    from argosy.transfer.torch_state import layout_of as layout_of
    from argosy.transfer.torch_state import torch_dtypes as torch_dtypes

_HOMES: dict[str, str] = {
    **dict.fromkeys(("describe", "layout_of", "torch_dtypes"), "argosy.transfer.torch_state"),
    **dict.fromkeys(("CorruptTransfer", "Moved", "move"), "argosy.transfer.sending"),
}
# What knows torch is imported when it is first used.
__getattr__, _torch_names = lazy(__name__, _HOMES)

__all__ = [
    "CHUNK_BYTES",
    "DTYPES",
    "ZERO",
    "Adoption",
    "Box",
    "Copy",
    "CorruptTransfer",
    "Explained",
    "Fused",
    "Kind",
    "Layout",
    "Made",
    "Member",
    "Move",
    "Moved",
    "Piece",
    "Placement",
    "Plan",
    "Progress",
    "Range",
    "Remap",
    "Renamed",
    "Role",
    "Split",
    "SplitUp",
    "Spot",
    "Stacked",
    "State",
    "Sums",
    "Tensor",
    "Transfer",
    "Transposed",
    "UnalignedBlocks",
    "Uncovered",
    "Unit",
    "Value",
    "add",
    "blocked",
    "checked_roles",
    "copy_boxes",
    "cut",
    "describe",
    "finish",
    "flat",
    "flat_boxes",
    "flat_buffer",
    "flat_members",
    "flat_ranges",
    "from_safetensors",
    "full_name",
    "held",
    "layout_of",
    "move",
    "overlaps",
    "parts_by_source",
    "replicated",
    "reshard",
    "role_of",
    "rows_of",
    "seen_from_source",
    "sharded",
    "spot",
    "strides_of",
    "torch_dtypes",
    "whole",
]
