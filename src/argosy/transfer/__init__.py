"""Tensors on the move: layouts, plans, digests, and what the state of a training consists of."""

from argosy.transfer.boxes import Box, cut, flat_boxes, strides_of, whole
from argosy.transfer.copying import ZERO, Copy, Spot, Sums, add, copy_boxes, finish, spot
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
from argosy.transfer.planning import CHUNK_BYTES, Explained, Move, Plan, Tensor, Transfer, Uncovered, overlaps, reshard

__all__ = [
    "CHUNK_BYTES",
    "ZERO",
    "Box",
    "Copy",
    "Explained",
    "Layout",
    "Move",
    "Piece",
    "Placement",
    "Plan",
    "Range",
    "Split",
    "Spot",
    "Sums",
    "Tensor",
    "Transfer",
    "Uncovered",
    "add",
    "copy_boxes",
    "cut",
    "finish",
    "flat",
    "flat_boxes",
    "flat_buffer",
    "from_safetensors",
    "overlaps",
    "replicated",
    "reshard",
    "sharded",
    "spot",
    "strides_of",
    "whole",
]
