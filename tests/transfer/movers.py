"""Four ranks carry plans out over gloo."""

import os

import torch
import torch.distributed as dist

from argosy.transfer import (
    Blocks,
    Fused,
    Layout,
    Placement,
    Remap,
    Split,
    SplitUp,
    Stacked,
    Tensor,
    Transposed,
    move,
    reshard,
    sharded,
)
from argosy.transfer.blocks import blocking_of

RANKS = 4
STAGING = 10_000


def full(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def local(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor, as its layout says."""
    pieces = layout.by_rank.get(rank, ())
    cells = sum(piece.box.cells for piece in pieces)
    buffer = torch.zeros(cells)
    for piece in pieces:
        if piece.box.cells:
            cut = whole[tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))]
            torch.as_strided(buffer, piece.box.shape, piece.strides, piece.offset).copy_(cut)
    return buffer


def layouts(shapes: dict[str, tuple[int, ...]], mesh: tuple[int, ...], placements: tuple[Placement, ...]):
    return {name: Tensor(sharded(shape, mesh, placements), 4, "F32") for name, shape in shapes.items()}


def check(source: dict[str, Tensor], destination: dict[str, Tensor], remap: Remap | None, wanted: dict) -> None:
    rank = dist.get_rank()
    plan = reshard(source, destination, remap=remap, staging_bytes=STAGING)
    held = {name: local(full(name, t.layout.shape), t.layout, rank) for name, t in source.items()}
    into = {name: torch.zeros_like(local(wanted[name], t.layout, rank)) for name, t in destination.items()}
    moved = move(plan, held, into, timeout_s=60)
    for name, tensor in destination.items():
        assert torch.equal(into[name], local(wanted[name], tensor.layout, rank)), name
    assert moved.staging_bytes <= STAGING
    explained = plan.explain()
    sent: list[int] = [0] * RANKS
    dist.all_gather_object(sent, moved.bytes_sent)
    assert sum(sent) == explained.bytes_sent == explained.bytes_bound


def check_blocks(rank: int) -> None:
    """Rows of 64 cells become columns of 16: codes go with other scales then."""
    whole = full("blocks", (8, 64))
    old, new = sharded((8, 64), (4,), (Split(0),)), sharded((8, 64), (4,), (Split(1),))
    blocks = Blocks(32, codes="codes", book=tuple(code / 127 for code in range(-128, 128)))

    def side(layout: Layout) -> dict[str, Tensor]:
        scales, blocking = blocking_of(layout, blocks)
        return {"w::codes": Tensor(layout, 1, "I8"), "w::scales": Tensor(scales, 4, "F32", blocking)}

    def numbers(side: dict[str, torch.Tensor]) -> torch.Tensor:
        return (side["w::codes"].view(-1, 32) / 127 * side["w::scales"][:, None]).view(-1)

    mine = local(whole, old, rank).view(-1, 32)
    scales = mine.abs().amax(1)
    codes = (mine / scales[:, None] * 127).round().to(torch.int8).view(-1)
    held = {"w::codes": codes, "w::scales": scales}
    into = {"w::codes": torch.zeros(128, dtype=torch.int8), "w::scales": torch.zeros(4)}
    plan = reshard(side(old), side(new), requantize=True, staging_bytes=STAGING)
    move(plan, held, into, timeout_s=60)
    assert torch.allclose(numbers(into), local(whole, new, rank), atol=float(whole.abs().max()) / 127)


def run(directory: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", RANKS), rank=rank, world_size=RANKS)
    shapes = {"w": (67, 33), "b": (41,), "s": ()}
    fsdp = layouts({"w": (67, 33), "b": (41,)}, (4,), (Split(0),)) | layouts({"s": ()}, (4,), ("replicate",))
    tp = layouts({"w": (67, 33)}, (2,), (Split(1),)) | layouts({"b": (41,), "s": ()}, (2,), ("replicate",))
    wanted = {name: full(name, shape) for name, shape in shapes.items()}
    check(fsdp, tp, None, wanted)
    check(tp, fsdp, None, wanted)
    check_blocks(rank)
    old = {"qkv": (60, 20), "gate": (30, 20), "up": (30, 20), "e0": (8, 6), "e1": (8, 6), "t": (12, 34)}
    remap = Remap((
        SplitUp("qkv", ("q", "k", "v"), (40, 10, 10)),
        Fused(("gate", "up"), "both", 1),
        Stacked(("e0", "e1"), "experts"),
        Transposed("t", "turned", (1, 0)),
    ))  # fmt: skip
    had = {name: full(name, shape) for name, shape in old.items()}
    wanted = {
        "q": had["qkv"][:40],
        "k": had["qkv"][40:50],
        "v": had["qkv"][50:],
        "both": torch.cat([had["gate"], had["up"]], 1),
        "experts": torch.stack([had["e0"], had["e1"]]),
        "turned": had["t"].t(),
    }
    new = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    check(layouts(old, (4,), (Split(0),)), layouts(new, (2, 2), (Split(0), Split(1))), remap, wanted)
