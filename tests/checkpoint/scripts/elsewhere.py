"""Ranks save, and another number of ranks goes on."""

import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from argosy.checkpoint import Saver, restore
from argosy.core import ConfigError


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        torch.manual_seed(seed + step)
        optimizer.zero_grad()
        model(torch.randn(4, 17)).pow(2).mean().backward()
        optimizer.step()


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(17, 13), nn.ReLU(), nn.Linear(13, 5))


def zero(model: nn.Module) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)


def save_zero(rank: int, path: str) -> None:
    model = network(1)
    optimizer = zero(model)
    trained(model, optimizer, 3)
    with Saver(path) as saver:
        saver.save({"model": model, "optimizer": optimizer}, 3).wait(300)
    trained(model, optimizer, 3, seed=10)
    if rank == 0:
        torch.save(model.state_dict(), f"{path}/expected.pt")
    dist.barrier()


def go_on(rank: int, path: str, *, plain: bool) -> None:
    model = network(2)
    optimizer = torch.optim.AdamW(model.parameters()) if plain else zero(model)
    restore(path, into={"model": model, "optimizer": optimizer})
    trained(model, optimizer, 3, seed=10)
    expected = torch.load(f"{path}/expected.pt")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def go_on_with_zero(rank: int, path: str) -> None:
    go_on(rank, path, plain=False)


def go_on_with_adamw(rank: int, path: str) -> None:
    go_on(rank, path, plain=True)


def save_generators(rank: int, path: str) -> None:
    with Saver(path) as saver:
        saver.save({"model": network(0), "random": torch.Generator().manual_seed(rank)}, 1).wait(300)


def restore_generators(rank: int, path: str) -> None:
    generator = torch.Generator().manual_seed(100 + rank)
    before = generator.get_state()
    restored = restore(path, into={"model": network(1), "random": generator})
    saved = torch.Generator().manual_seed(rank).get_state()
    assert torch.equal(generator.get_state(), saved if rank < 2 else before)
    assert restored.kept == ([] if rank < 2 else [f"rank{rank}/random"])


class Both(nn.Module):
    """What all ranks share, and what each has for itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = nn.parallel.DistributedDataParallel(network(seed))
        self.expert = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.body(x))


def save_own(rank: int, path: str) -> None:
    model = Both(1)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 3, seed=100 * rank)
    state = {"model": model, "optimizer": optimizer}
    with Saver(path) as saver:
        with pytest.raises(ConfigError, match=r"all ranks have the same model\.expert\.weight") as refused:
            saver.save(state, 3)
        assert "Saver(..., replicated=[model])" in refused.value.hint
    with Saver(path, own=["expert"]) as saver:
        saver.save(state, 3).wait(300)
    torch.save([model.state_dict(), optimizer.state_dict()], f"{path}/rank{rank}.pt")
    dist.barrier()


def restore_own(rank: int, path: str) -> None:
    model = Both(2)
    optimizer = torch.optim.AdamW(model.parameters())
    restore(path, into={"model": model, "optimizer": optimizer}, own=["expert"])
    tensors, saved = torch.load(f"{path}/rank{rank}.pt")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, saved["state"][number][key]) for key, value in state.items())
    own = [torch.load(f"{path}/rank{each}.pt")[0]["expert.weight"] for each in range(2)]
    assert not torch.equal(*own)


class Meter:
    """Something of a user's that is not alike on all ranks."""

    def __init__(self, rank: int) -> None:
        self.counts = torch.full((3 + rank,), rank)  # Not even as many.

    def state_dict(self) -> dict[str, object]:
        return {"counts": self.counts, "name": "meter"}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.counts = state["counts"]


def cursors(rank: int) -> dict[str, object]:
    """What a script keeps of each rank beside the model."""
    return {
        "model": network(0),
        "torch": torch.Generator().manual_seed(rank).get_state(),  # As torch.get_rng_state().
        "python": random.Random(rank).getstate(),
        "numpy": np.random.RandomState(rank).get_state(),
        "cursor": {"shard": rank, "at": [rank, rank + 1]},
        "meter": Meter(rank),
        "large": torch.full((5 << 20,), 5.0),
        "best": None if rank % 2 else torch.ones(2),
        "many": [torch.tensor([rank, i]) for i in range(100 + rank)],
        "epoch": 3,
        f"only{rank}": rank,
    }


def save_cursors(rank: int, path: str) -> None:
    with Saver(path) as saver:
        saver.save(cursors(rank), 1).wait(300)


def text_of(state: dict[str, object]) -> str:
    """All of it but the model, to compare."""
    rest = {name: value for name, value in state.items() if name not in ("model", "large") and "only" not in name}
    many = torch.stack(rest["many"]).tolist()
    return repr({**rest, "torch": rest["torch"].sum(), "meter": rest["meter"].counts, "many": many})


def restore_cursors(rank: int, path: str) -> None:
    size = dist.get_world_size()
    state = cursors(rank + 10)
    del state[f"only{rank + 10}"]
    if rank < 2:
        state[f"only{rank}"] = -1
    restored = restore(path, into=state, partial=True)
    whose = rank if rank < 2 else 0
    assert text_of(state) == text_of(cursors(whose)), rank
    assert torch.equal(state["torch"], cursors(whose)["torch"]), restored.differing
    assert state["epoch"] == 3
    assert state.get(f"only{rank}", rank) == rank
    assert restored.differing == ([] if size == 2 else ["best", "cursor", "many", "meter", "numpy", "python", "torch"])


def save_and_restore_some_roles(rank: int, path: str) -> None:
    """Tensors that were left out stay as they are; what ranks share is restored."""
    with Saver(f"{path}/some") as saver:
        saver.save(cursors(rank), 1, roles={"parameter", "buffer"}).wait(300)
    dist.barrier()
    state = cursors(rank + 10)
    restore(f"{path}/some", into=state, partial=True)
    assert state["cursor"] == {"shard": rank, "at": [rank, rank + 1]}
    assert state["meter"].counts.tolist() == [0, 0, 0], "rank 0's, as nobody saved the others"


def restore_by_another_name(rank: int, path: str) -> None:
    state = {"model": network(1), "position": torch.zeros(5056, dtype=torch.uint8)}
    restore(path, into=state, rename={"torch": "position"}, partial=True)
    assert torch.equal(state["position"], cursors(rank)["torch"])


def look_at_cursors(rank: int, path: str) -> None:
    found = restore(path)
    assert "rank1/epoch" not in found.values, "it is the same on all ranks"
    assert found.values["cursor"]["shard"] == 0
    assert found.values["rank1/cursor"] == {"shard": 1, "at": [1, 2]}
    assert found.values["rank1/only1"] == 1
    assert torch.equal(found.tensors["rank1/meter.counts"], torch.full((4,), 1))
    assert "rank1/large" not in found.tensors


def as_rank(work: Callable[[int, str], None], path: str) -> None:
    """Do the work as the rank that the environment says."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{path}/store-{work.__name__}-{count}", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    work(rank, path)


STAGES = {
    "zero": [(2, save_zero), (2, go_on_with_zero), (3, go_on_with_zero), (1, go_on_with_adamw)],
    "own": [(2, save_own), (2, restore_own)],
    "generators": [(2, save_generators), (3, restore_generators)],
    "cursors": [
        (2, save_cursors),
        (2, restore_cursors),
        (3, restore_cursors),
        (1, look_at_cursors),
        (2, save_and_restore_some_roles),
        (2, restore_by_another_name),
    ],
}
