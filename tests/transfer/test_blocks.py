"""Quantised blocks: where they are, what they mean, and what it costs to have them cut elsewhere."""

import random

import numpy as np
import pytest
import torch
from seeds import each

from argosy.core import ConfigError
from argosy.transfer import Blocks, Layout, Split, UnalignedBlocks, replicated, sharded
from argosy.transfer.blocks import BLOCKS_NOTE, blocking_of, cells_of, from_note, note_of
from argosy.transfer.requantising import Book, Requantise

LINEAR = tuple(code / 127 for code in range(-128, 128))


def random_layout(dice: random.Random) -> Layout:
    shape = tuple(dice.randint(1, 12) for _ in range(dice.randint(1, 3)))
    mesh = tuple(dice.randint(1, 3) for _ in range(dice.randint(1, 2)))
    placements = tuple(dice.choice(("replicate", Split(dice.randrange(len(shape))))) for _ in mesh)
    return sharded(shape, mesh, placements)


@each("seed", range(40))
def test_each_cell_has_the_scale_of_its_place_in_memory(seed: int):
    dice = random.Random(seed)
    layout = random_layout(dice)
    blocks = Blocks(dice.randint(1, 9), "codes")
    scales, blocking = blocking_of(layout, blocks)
    for rank in layout.ranks:
        cells = cells_of(layout, rank)
        mine = [
            number for piece in scales.held.get(rank, ()) for number in range(piece.box.start[0], piece.box.stop[0])
        ]
        assert len(mine) == -(-len(cells) // blocks.size)
        expected = [mine[place // blocks.size] for place in range(len(cells))]
        assert blocking.numbers(cells).tolist() == expected
    assert blocking.count == scales.shape[0]


@each("seed", range(20))
def test_a_ranks_cells_are_those_of_its_pieces(seed: int):
    layout = random_layout(random.Random(seed))
    whole = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    for rank in layout.ranks:
        held = np.zeros(sum(piece.box.cells for piece in layout.by_rank[rank]), np.int64)
        for piece in layout.held[rank]:
            cut = whole[tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))]
            view = np.lib.stride_tricks.as_strided(
                held[piece.offset :], piece.box.shape, [8 * s for s in piece.strides]
            )
            view[...] = cut
        assert cells_of(layout, rank).tolist() == held.tolist()


def test_what_is_stored_of_blocks_comes_back():
    _, blocking = blocking_of(sharded((4, 8), (2,), (Split(1),)), Blocks(4, "codes", "map"))
    assert from_note({BLOCKS_NOTE: {"scales": note_of(blocking)}}, "scales") == blocking
    assert len(blocking.parts) == 2
    assert from_note({}, "scales") is None


def test_blocks_that_nobody_describes_must_be_aligned():
    with pytest.raises(UnalignedBlocks, match="not contiguous"):
        blocking_of(sharded((4, 8), (2,), (Split(1),)), Blocks(4))
    with pytest.raises(ConfigError, match="above 0: 0"):
        Blocks(0)


BOOKS = {
    "int8, linear": (torch.int8, LINEAR),
    "uint8, by a tensor": (torch.uint8, torch.linspace(-1, 1, 255)),
    "uint8, positive": (torch.uint8, torch.linspace(0, 1, 256) ** 2),
    "float8": (torch.float8_e4m3fn, None),
}


@pytest.mark.parametrize("kind", BOOKS)
def test_the_nearest_code_is_taken_and_codes_stay(kind: str):
    dtype, values = BOOKS[kind]
    codes = torch.arange(255).to(torch.uint8).view(torch.int8 if dtype is torch.int8 else torch.uint8)
    codes = codes[codes != 127].view(dtype) if dtype is torch.float8_e4m3fn else codes
    book = Book(values, codes)
    meant = book.values(codes)
    assert torch.equal(book.values(book.codes(meant)), meant)


def quantised(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % size)).view(-1, size)
    scales = blocks.abs().amax(1)
    codes = (blocks / scales.where(scales > 0, 1)[:, None] * 127).round().to(torch.int8)
    return codes.flatten()[: values.numel()].view_as(values), scales


@pytest.mark.parametrize(("old", "new"), [(16, 8), (8, 16), (16, 7), (5, 64)])
def test_values_stay_within_a_step_of_their_new_block(old: int, new: int):
    values = torch.randn(13, 21, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 4, 21)
    values[3] = 0
    codes, old_scales = quantised(values, old)
    layout = replicated(tuple(values.shape))
    _, before = blocking_of(layout, Blocks(old, "codes", LINEAR))
    layout_new, after = blocking_of(layout, Blocks(new, "codes", LINEAR))
    meant = codes.flatten() / 127 * old_scales.repeat_interleave(old)[: values.numel()]
    scales = torch.zeros(layout_new.shape)
    Requantise(
        codes=codes, scales=scales, old_scales=old_scales, book=LINEAR, old=before, new=after, layout=layout, rank=0
    ).run()
    found = codes.flatten() / 127 * scales.repeat_interleave(new)[: values.numel()]
    step = scales.repeat_interleave(new)[: values.numel()] / 127
    assert ((found - meant).abs() <= step * 0.51).all()
    assert codes.view(13, 21)[3].eq(0).all()
