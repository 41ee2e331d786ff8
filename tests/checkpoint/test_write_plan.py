"""Who writes what: ranks decide alone, and agree."""

import gc
import random
import weakref
from collections import Counter
from pathlib import Path

import torch

from argosy.checkpoint import KeepLast, Saver, restore
from argosy.checkpoint.write_plan import shares
from argosy.transfer import Box, Layout, Member, State, Unit, describe, replicated


def test_a2_each_box_has_one_writer_where_ranks_have_different_tensors():
    """Stages of a pipeline, some tensors on several of them: ranks plan alone and agree."""
    rng = random.Random(0)
    for _ in range(50):
        size = rng.randrange(2, 6)
        layouts: dict[str, Layout] = {}
        for i in range(rng.randrange(3, 30)):
            holders = tuple(sorted(rng.sample(range(size), rng.randrange(1, size + 1))))
            layouts[f"t{i}"] = replicated((rng.choice([3, 20_000, 20_000_000]),), holders)
        written = Counter[tuple[str, Box]]()
        cells = Counter[str]()
        for rank in range(size):
            units = {
                name: Unit(name, {"parameter": Member("parameter", "parameter", "F32", layout)})
                for name, layout in layouts.items()
                if rank in layout.ranks
            }
            for share in shares(State(rank, size, units)):
                written[share.name, share.entry.box] += 1
                cells[share.name] += share.entry.box.cells
        assert set(written.values()) == {1}
        assert cells == {name: layout.shape[0] for name, layout in layouts.items()}


def test_a1_buffers_are_one_ranks_and_the_rest_is_shared():
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(20_000) for _ in range(6)))
    writers: dict[str, set[int]] = {"buffer": set(), "parameter": set()}
    for rank in (0, 1):
        for share in shares(describe(model, ranks=(rank, 2))):
            writers[share.entry.role].add(rank)
    assert writers == {"buffer": {0}, "parameter": {0, 1}}


class Net(torch.nn.Module):
    """Tied, buffered, and with room for what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.last = torch.nn.Linear(6, 6)
        self.last.weight = self.first.weight


def replaced(net: Net, _: torch.optim.Optimizer) -> None:
    net.last.bias = torch.nn.Parameter(torch.randn(6))


def moved(net: Net, _: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clone() + 1


def transposed(net: Net, _: torch.optim.Optimizer) -> None:
    net.first.weight.data = torch.randn(6, 6).t()


def narrower(net: Net, _: torch.optim.Optimizer) -> None:
    net.last.bias.data = net.last.bias.data.bfloat16()


def larger(net: Net, _: torch.optim.Optimizer) -> None:
    net.more = torch.nn.Parameter(torch.randn(40_000))


def untied(net: Net, _: torch.optim.Optimizer) -> None:
    net.last.weight = torch.nn.Parameter(torch.randn(6, 6))


def normed(net: Net, _: torch.optim.Optimizer) -> None:
    net.norm(torch.randn(8, 6))


def stepped(net: Net, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_whatever_changes_between_saves_each_is_whole(tmp_path: Path):
    """What was arranged for the last save serves the next one only if the state still has the same form."""
    net = Net()
    optimizer = torch.optim.AdamW([net.first.weight, net.norm.weight], fused=True)
    changes = [stepped, moved, moved, moved, replaced, transposed, narrower, larger, normed, normed, untied, stepped]
    with Saver(tmp_path, keep=[KeepLast(1)], say=lambda _: None) as saver:
        for step, change in enumerate(changes):
            saver.save({"net": net, "optimizer": optimizer}, 2 * step).wait(300)
            change(net, optimizer)
            saver.save({"net": net, "optimizer": optimizer}, 2 * step + 1).wait(300)
            found = restore(tmp_path).tensors
            kept = {name: value for name, value in net.state_dict().items() if name in found}
            assert set(net.state_dict()) - set(kept) <= {"last.weight"}, "only the tied one is under another name"
            for name, value in kept.items():
                assert found[name].dtype == value.dtype, (change, name)
                assert torch.equal(found[name], value), (change, name)
            for key, value in optimizer.state[net.first.weight].items():
                assert torch.equal(found[f"first.weight::{key}"], value), (change, key)


def test_states_of_one_form_are_arranged_once_and_none_is_kept(tmp_path: Path):
    net = Net()
    with Saver(tmp_path, keep=[KeepLast(1)]) as saver:
        for step in range(4):
            moved(net, None)
            saver.save(net, step).wait(300)
        arranged, old = saver._arranged, weakref.ref(net.first.bias)
        moved(net, None)
        normed(net, None)
        gc.disable()
        try:
            saver.save(net, 4).wait(300)
            assert saver._arranged is arranged
            net.first.bias = torch.nn.Parameter(torch.zeros(6))
            assert old() is None, "what a save has copied is not held by it"
        finally:
            gc.enable()
        saver.save(net, 5, roles=["buffer"]).wait(300)
        assert {share.name for share in saver._arranged.shares} == set(dict(net.named_buffers()))
