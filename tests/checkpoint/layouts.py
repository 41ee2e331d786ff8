"""A small model under every layout that torch has here, trained with given gradients: run as `layouts.py DIRECTORY`.

Each rank computes the same full gradients by name, so that the result does not depend on who averages what.
"""

import os
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from argosy.checkpoint import Saver, restore
from argosy.transfer import State, describe, flat_members

RANKS = {"one": 1, "ddp2": 2, "zero2": 2, "fsdp2": 2, "fsdp4": 4, "tp2": 2, "fsdp2tp2": 4}
SHAPES = {"up.weight": (12, 6), "up.bias": (12,), "down.weight": (6, 12), "down.bias": (6,)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


class Plain:
    """torch's own modules and optimizer, in whatever layout."""

    def __init__(self, layout: str) -> None:
        net = Net()
        if "tp2" in layout:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if layout == "fsdp2tp2" else None
            tp = mesh["tp"] if mesh else init_device_mesh("cpu", (2,))
            parallelize_module(net, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if mesh:
                fully_shard(net, mesh=mesh["dp"])
        elif layout.startswith("fsdp"):
            fully_shard(net, mesh=init_device_mesh("cpu", (RANKS[layout],)))
        self.net = nn.parallel.DistributedDataParallel(net) if layout == "ddp2" else net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)

    def train(self, step: int) -> None:
        for name, parameter in self.net.named_parameters():
            full = gradient(name.removeprefix("module."), step)
            sharded = isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements) if sharded else full
        self.optimizer.step()

    def state(self) -> State:
        return describe(self.net, self.optimizer)

    def full(self) -> dict[str, torch.Tensor]:
        named = self.net.named_parameters()
        return {
            n.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named
        }


class Zero:
    """ZeRO-1: parameters replicated, the optimizer's state flat ranges that cross the borders of parameters."""

    def __init__(self) -> None:
        self.net = Net()
        self.rank = dist.get_rank()
        cells = sum(p.numel() for p in self.net.parameters())
        self.each = -(-cells // 2)
        self.flat = nn.Parameter(self._part({n: p.detach() for n, p in self.net.named_parameters()}))
        self.optimizer = torch.optim.AdamW([self.flat], lr=0.05)

    def _part(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        whole = torch.cat([tensors[name].flatten() for name in SHAPES])
        padded = torch.cat([whole, torch.zeros(2 * self.each - len(whole))])
        return padded[self.rank * self.each : (self.rank + 1) * self.each].clone()

    def train(self, step: int) -> None:
        self.flat.data.copy_(self._part({n: p.detach() for n, p in self.net.named_parameters()}))
        self.flat.grad = self._part({name: gradient(name, step) for name in SHAPES})
        self.optimizer.step()
        parts = [torch.empty(self.each) for _ in range(2)]
        dist.all_gather(parts, self.flat.data)
        whole, position = torch.cat(parts), 0
        for parameter in self.net.parameters():
            parameter.data.copy_(whole[position : position + parameter.numel()].view_as(parameter))
            position += parameter.numel()

    def state(self) -> State:
        """Described by hand: parameters as torch has them, moments from the flat buffers."""
        if not self.optimizer.state:
            self.flat.grad = torch.zeros_like(self.flat)
            self.optimizer.step()
        own = self.optimizer.state[self.flat]
        state = describe(self.net)
        buffers = {key: ("moment", "F32", own[key]) for key in ("exp_avg", "exp_avg_sq")}
        members = flat_members(SHAPES, buffers, 2)
        step = describe(others={"step": own["step"]}).units["step"].members["value"]
        for name, unit in state.units.items():
            unit.members |= members[name]
            unit.members["step"] = type(step)("step", "step", step.dtype, step.layout, step.local, "scalar")
        return by_hand(state)

    def full(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.net.named_parameters()}


def by_hand(state: State) -> State:
    """A state whose tensors are all there: what is stored goes into what is described."""
    from argosy.transfer import Adoption

    def adopt(stored: State) -> Adoption:
        here = {name: member for name, _, member in state.members()}
        wanted = {name for name, _, _ in stored.members()}
        return Adoption({n: here[n] for n in wanted & set(here)}, lambda: None, sorted(set(here) - wanted))

    state.adopt = adopt
    return state


def run(layout: str, work: str, mode: str, rank: int) -> None:
    """What one rank does."""
    if RANKS[layout] > 1:
        store = dist.FileStore(f"{work}/store-{layout}-{mode}", RANKS[layout])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS[layout])
    if mode == "save":
        training = Zero() if layout == "zero2" else Plain(layout)
        for step in range(3):
            training.train(step)
        with Saver(f"{work}/{layout}", sample=1) as saver:
            saver.save(training.state(), 3).wait(300)
        return
    for source in RANKS:
        training = Zero() if layout == "zero2" else Plain(layout)
        restore(f"{work}/{source}", into=training.state())
        training.train(3)
        found = training.full()
        if rank == 0:
            torch.save(found, f"{work}/{source}-to-{layout}.pt")


def fork(layout: str, work: str, mode: str) -> None:
    """Run all ranks of a layout as children of this warm process."""
    children: list[int] = []
    for rank in range(RANKS[layout]):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        try:
            run(layout, work, mode, rank)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert not any(codes), f"{layout}, {mode}: {codes}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for mode in ("save", "restore"):
        for layout in RANKS:
            fork(layout, sys.argv[1], mode)
