"""Random layouts against gather-then-slice; digests that do not depend on the cut."""

import random

import numpy as np
import pytest
from seeds import each

from argosy.transfer import (
    ZERO,
    Box,
    Copy,
    Layout,
    Piece,
    Range,
    Split,
    add,
    copy_boxes,
    cut,
    finish,
    flat,
    flat_boxes,
    flat_buffer,
    replicated,
    sharded,
    spot,
    strides_of,
    whole,
)

pytestmark = pytest.mark.native


def random_layout(rng: random.Random, shape: tuple[int, ...]) -> Layout:
    """A layout of any kind that covers the tensor."""
    kind = rng.choice(["replicated", "sharded", "flat", "strided", "mixed"])
    if not shape or kind == "replicated":
        return replicated(shape, tuple(range(rng.randint(1, 4))))
    dim = rng.randrange(len(shape))
    if kind == "sharded":
        return sharded(shape, (rng.randint(1, 5),), (Split(dim),))
    if kind == "mixed":
        other: object = rng.choice(["replicate", Split(rng.randrange(len(shape)))])
        return sharded(shape, (rng.randint(1, 3), rng.randint(1, 3)), (Split(dim), other))  # type: ignore[arg-type]
    if kind == "strided":
        factor = rng.randint(2, 3)
        return sharded(shape, (rng.randint(1, 3), factor), (Split(dim, factor), Split(dim)))
    cells = whole(shape).cells
    borders = sorted(rng.randint(0, cells) for _ in range(rng.randint(0, 4)))
    spans = list(zip([0, *borders], [*borders, cells], strict=True))
    return flat(shape, [Range(rank, a, b, rng.randint(0, 3)) for rank, (a, b) in enumerate(spans)])


def buffers(layout: Layout, dtype: str) -> dict[int, np.ndarray]:
    """An empty local buffer per rank, large enough for its pieces."""
    sizes: dict[int, int] = {}
    for piece in layout.pieces:
        last = sum((n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True))
        sizes[piece.rank] = max(sizes.get(piece.rank, 0), piece.offset + last + 1 if piece.box.cells else 0)
    return {rank: np.zeros(size, dtype) for rank, size in sizes.items()}


def view(buffer: np.ndarray, piece: Piece) -> np.ndarray:
    strides = [s * buffer.itemsize for s in piece.strides]
    return np.lib.stride_tricks.as_strided(buffer[piece.offset :], piece.box.shape, strides)


def cells_of(full: np.ndarray, box: Box) -> np.ndarray:
    return full[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


def place(buffer: np.ndarray, piece: Piece, box: Box):
    inside = [a - b for a, b in zip(box.start, piece.box.start, strict=True)]
    return spot(buffer.ctypes.data + piece.offset * buffer.itemsize, buffer.itemsize, piece.strides, inside)


@each("seed", range(150))
def test_copies_between_layouts_equal_gather_then_slice(seed: int):
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(rng.randint(0, 4)))
    dtype = rng.choice(["u1", "<u2", "<f4", "<f8"])
    full = np.frombuffer(rng.randbytes(whole(shape).cells * np.dtype(dtype).itemsize), dtype).reshape(shape)
    old, new = random_layout(rng, shape), random_layout(rng, shape)
    source, destination = buffers(old, dtype), buffers(new, dtype)
    for piece in old.pieces:
        if piece.box.cells:
            view(source[piece.rank], piece)[...] = cells_of(full, piece.box)
    size = full.itemsize
    copies: list[Copy] = []
    for piece in new.pieces:
        missing = [piece.box] if piece.box.cells else []
        for held in old.pieces:
            common = [part & held.box for part in missing]
            copies += [
                Copy(box, shape, size, place(source[held.rank], held, box), place(destination[piece.rank], piece, box))
                for box in common
                if box is not None
            ]
            missing = [part for each in missing for part in each - held.box]
        assert not missing
    sums = add(copy_boxes(copies, threads=rng.randint(1, 3)))
    for piece in new.pieces:
        if piece.box.cells:
            assert view(destination[piece.rank], piece).tobytes() == cells_of(full, piece.box).tobytes()
    written = sum(copy.box.cells for copy in copies)
    assert written == sum(piece.box.cells for piece in new.pieces)
    if written == full.size:  # The digest of all copies is that of the tensor, however it was cut.
        assert sums == sums_of(full)


def sums_of(full: np.ndarray, box: Box | None = None):
    box = box or whole(full.shape)
    strides = tuple(s // full.itemsize for s in full.strides)
    return copy_boxes(
        [Copy(box, full.shape, full.itemsize, spot(full.ctypes.data, full.itemsize, strides, box.start))]
    )[0]


@each("seed", range(40))
def test_sums_of_parts_are_the_sum_of_the_whole(seed: int):
    rng = random.Random(seed)
    shape = (rng.randint(1, 40), rng.randint(1, 700), rng.randint(1, 3))
    full = np.frombuffer(rng.randbytes(2 * whole(shape).cells), "<u2").reshape(shape)
    parts = [whole(shape)]
    for _ in range(12):
        part = parts.pop(rng.randrange(len(parts)))
        dim = rng.randrange(3)
        at = rng.randint(0, part.shape[dim])
        left = Box(part.start, (*part.shape[:dim], at, *part.shape[dim + 1 :]))
        parts += [left, *(part - left)] if left.cells else [part]
    assert add(sums_of(full, part) for part in parts) == sums_of(full)


def test_flips_and_swaps_change_the_digest():
    rng = random.Random(0)
    clean = np.frombuffer(rng.randbytes(40_000), "u1")
    for _ in range(300):
        changed = clean.copy()
        if rng.random() < 0.5:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        else:
            i, j = rng.sample(range(0, len(changed), 4), 2)
            changed[i : i + 4], changed[j : j + 4] = clean[j : j + 4], clean[i : i + 4]
        if not np.array_equal(changed, clean):
            assert sums_of(changed) != sums_of(clean)


def test_the_name_the_dtype_and_the_shape_are_part_of_the_digest():
    digests = {
        finish("a", "F32", (2, 2), ZERO),
        finish("b", "F32", (2, 2), ZERO),
        finish("a", "I32", (2, 2), ZERO),
        finish("a", "F32", (4,), ZERO),
    }
    assert len(digests) == 4


def test_flat_buffers_cross_borders_and_know_their_padding():
    layouts = flat_buffer({"a": (3, 3), "b": (5,), "c": (0,)}, ranks=4, align=2)
    assert [(p.rank, p.offset, p.box.cells) for p in layouts["a"].pieces][:2] == [(0, 0, 3), (0, 3, 1)]
    assert {name: sum(p.box.cells for p in layouts[name].pieces) for name in "abc"} == {"a": 9, "b": 5, "c": 0}
    assert {p.rank for p in layouts["b"].pieces} == {2, 3}


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_cuts_follow_each_other_and_are_small(limit: int):
    box = Box((2, 1, 0), (3, 4, 5))
    parts = list(cut(box, limit))
    assert sum(part.cells for part in parts) == 60
    assert all(part.cells <= limit for part in parts)
    strides = strides_of((9, 9, 9))
    firsts = [sum(a * s for a, s in zip(part.start, strides, strict=True)) for part in parts]
    assert firsts == sorted(firsts)


def test_flat_boxes_are_in_order():
    for first in range(24):
        for last in range(first, 25):
            cells = [i for box in flat_boxes((2, 3, 4), first, last) for i in np.arange(24).reshape(2, 3, 4)[
                tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].ravel()]  # fmt: skip
            assert cells == list(range(first, last))
