"""Layouts, copies and digests of tensors, and what the state of a training consists of."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy
from argosy.transfer.boxes import CHUNK_BYTES, Box, cut, flat_boxes, strides_of, whole
from argosy.transfer.copying import (
    ZERO,
    Copy,
    Progress,
    Spot,
    Sums,
    Table,
    add,
    copy_boxes,
    finish,
    rows_of,
    spot,
    table_of,
)
from argosy.transfer.layout import (
    Layout,
    Piece,
    Placement,
    Range,
    Split,
    blocked,
    flat,
    flat_buffer,
    from_safetensors,
    replicated,
    sharded,
)
from argosy.transfer.trees import grown, holds_values, references, referring
from argosy.transfer.units import (
    DTYPES,
    WRAPPED_NOTE,
    Adoption,
    Kind,
    Member,
    Role,
    State,
    Unit,
    Value,
    checked_roles,
    flat_members,
    full_name,
    held,
    is_plain,
    role_of,
    why_fixed,
)

if TYPE_CHECKING:
    from argosy.transfer.torch_state import describe as describe
    from argosy.transfer.torch_state import layout_of as layout_of
    from argosy.transfer.torch_state import torch_dtypes as torch_dtypes

# What knows torch is imported when it is first used.
__getattr__, _torch_names = lazy(__name__)

__all__ = [
    "CHUNK_BYTES",
    "DTYPES",
    "WRAPPED_NOTE",
    "ZERO",
    "Adoption",
    "Box",
    "Copy",
    "Kind",
    "Layout",
    "Member",
    "Piece",
    "Placement",
    "Progress",
    "Range",
    "Role",
    "Split",
    "Spot",
    "State",
    "Sums",
    "Table",
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
    "from_safetensors",
    "full_name",
    "grown",
    "held",
    "holds_values",
    "is_plain",
    "layout_of",
    "references",
    "referring",
    "replicated",
    "role_of",
    "rows_of",
    "sharded",
    "spot",
    "strides_of",
    "table_of",
    "torch_dtypes",
    "whole",
    "why_fixed",
]
