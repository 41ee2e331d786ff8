"""Trainings of many kinds, small enough for a test: what they have in common is that they must survive."""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint.state_dict  # As the example of a GPT does.
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

# All scripts beside this one import no more than it does: so one zygote serves them all.
from argosy.collective import segment  # noqa: F401
from argosy.data import Loader, Queue  # noqa: F401
from argosy.train import Run, read_log  # noqa: F401

sys.path.append(str(Path(__file__).parents[3] / "examples"))
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
if DEVICE == "emul":
    sys.path.append(str(Path(__file__).parents[2]))
    import emulation

    switches = emulation.load_accelerator()
    switches.set_copy_seconds(0.01)


def break_device():
    """A copy fails: it is found out later, and the device is of no more use."""
    switches.fail_next_copy()
    torch.empty(1, pin_memory=True).copy_(torch.ones(1, device=DEVICE), non_blocking=True)


def exhaust_memory():
    """The device has no memory left for this process."""
    switches.set_memory_limit(1)
    torch.empty(100, device=DEVICE)


SAMPLES = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)


def network(*, norm: bool = False) -> nn.Sequential:
    layers = [nn.Linear(8, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)]
    return nn.Sequential(*layers).to(DEVICE)


def wrapped(run, module):
    return DDP(module, bucket_cap_mb=0.001) if run.size > 1 else module


def digest_of(run, without: str = "?") -> str:
    seen = hashlib.blake2s(digest_size=6)
    found = run.tracked.state().tensors()
    for name in sorted(name for name in found if without not in name):
        seen.update(found[name].contiguous().cpu().numpy().tobytes())
    seen.update(repr(sorted(run.state.items())).encode())
    return seen.hexdigest()


def end(run, without: str = "?") -> None:
    """Say what all ranks ended with, but for some names; none ends before all have said it."""
    if os.environ.get("ARGOSY_COLLECTIVES") == "gloo":
        assert run.crew.group._transport.shared is None
    digests = run.crew.gather(digest_of(run, without))
    if run.rank == 0:
        print("digests", *digests, [row.step for row in read_log(run.directory)], flush=True)
    if run.size > 1:
        torch.distributed.barrier()


class Plain:
    """A model under DDP, an optimizer, one microbatch."""

    loss = torch.zeros(())

    def __init__(self, run, place):
        self.run, self.place = run, place
        self.data = Loader(SAMPLES, batch=8, seed=2)
        self.build()

    def build(self):
        self.model = wrapped(self.run, network())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.run.track(model=self.model, optimizer=self.optimizer)

    def step(self, step, place):
        batch = step.batch(self.data).to(DEVICE)
        ids = self.data.handed.ids
        place("forward")
        self.loss = self.model(batch).square().mean()
        hook = next(iter(self.model.parameters())).register_hook(lambda _: place("reduce"))
        place("backward")
        self.loss.backward()
        hook.remove()
        place("before vote")
        self.optimizer.step()
        place("after vote")
        self.run.state["count"] = self.run.state.get("count", 0) + 1
        return ids


class Messy(Plain):
    """Accumulation, scaler, clipping, schedule, average, BatchNorm and dropout."""

    def build(self):
        self.data = Loader(SAMPLES, batch=16, micro=2, seed=2)
        self.model = wrapped(self.run, network(norm=True))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        inner = self.model.module if self.run.size > 1 else self.model
        self.average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.inner = inner
        things = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.run.track(**things, scaler=self.scaler, average=self.average)

    def step(self, step, place):
        ids = []
        for batch in step.batches(self.data):
            ids += self.data.handed.ids
            place("forward")
            self.loss = self.model(batch).square().mean() * step.scale
            hook = next(iter(self.model.parameters())).register_hook(lambda _: place("reduce"))
            self.scaler.scale(self.loss).backward()
            hook.remove()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        place("before vote")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        place("after vote")
        self.schedule.step()
        self.average.update_parameters(self.inner)
        return ids


class Gan(Plain):
    """Two models and two optimizers: gradients are exchanged between the two updates."""

    def build(self):
        self.maker = wrapped(self.run, nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
        self.critic = wrapped(self.run, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (self.critic, self.maker)]
        self.run.track(maker=self.maker, critic=self.critic, first=self.optimizers[0], second=self.optimizers[1])

    def step(self, step, place):
        real = step.batch(self.data)
        ids = self.data.handed.ids
        noise = torch.randn(len(real), 4)
        place("forward")
        loss = self.critic(self.maker(noise).detach()).mean() - self.critic(real).mean()
        loss.backward()
        place("reduce")
        self.optimizers[0].step()
        place("after vote")
        self.optimizers[1].zero_grad()
        self.loss = -self.critic(self.maker(noise)).mean()
        self.loss.backward()
        place("before vote")
        self.optimizers[1].step()
        return ids


class Sharded(Plain):
    """FSDP2."""

    def build(self):
        self.model = network()
        fully_shard(self.model[0])
        fully_shard(self.model[3])
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.run.track(model=self.model, optimizer=self.optimizer)


class Hybrid(Sharded):
    """FSDP2 within pairs of ranks, replicas between the pairs (HSDP)."""

    def build(self):
        mesh = init_device_mesh("cpu", (self.run.size // 2, 2), mesh_dim_names=("replicate", "shard"))
        self.model = network()
        fully_shard(self.model[0], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.run.track(model=self.model, optimizer=self.optimizer)


class Adapted(Plain):
    """A frozen model with small matrices beside it that learn (LoRA), and a scaler that is switched off."""

    def build(self):
        base = network().requires_grad_(False)
        down, up = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(up.weight)
        self.model = wrapped(self.run, Beside(base, nn.Sequential(down, up)))
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.run.track(model=self.model, optimizer=self.optimizer, scaler=self.scaler)

    def step(self, step, place):
        batch = step.batch(self.data)
        place("forward")
        self.loss = (self.model(batch) - 1).square().mean()
        self.scaler.scale(self.loss).backward()
        place("before vote")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        place("after vote")
        return self.data.handed.ids


class Beside(nn.Module):
    def __init__(self, base, adapter):
        super().__init__()
        self.base, self.adapter = base, adapter

    def forward(self, x):
        return self.base(x) + self.adapter(x)


class Compiled(Plain):
    """A model that is traced and cut into graphs, without the minute that code for them would take."""

    def build(self):
        whole = DDP(network())
        self.optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
        self.run.track(model=whole, optimizer=self.optimizer)
        self.model = torch.compile(whole, backend="aot_eager")


class Grid(Plain):
    """FSDP2 and tensor parallelism: ranks that share a part of the model share their samples."""

    def build(self):
        mesh = init_device_mesh("cpu", (self.run.size // 2, 2), mesh_dim_names=("dp", "tp"))
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        parallelize_module(self.model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data.place(mesh["dp"].get_local_rank(), mesh["dp"].size())
        self.run.track(model=self.model, optimizer=self.optimizer)


class Staged(Plain):
    """Two stages of a pipeline: each rank has its own half of the model, and all samples."""

    def build(self):
        first, rank = nn.Linear(8, 16), self.run.rank
        self.model = nn.ModuleDict({"first": first} if rank == 0 else {"last": nn.Linear(16, 4)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.run.track(model=self.model, optimizer=self.optimizer)
        self.data.place(0, 1)
        shapes = [torch.empty(2, size, device="meta", requires_grad=size != 8) for size in (8, 16, 4)]
        module = next(iter(self.model.values()))
        stage = PipelineStage(
            module, rank, 2, torch.device("cpu"), input_args=shapes[rank], output_args=shapes[rank + 1]
        )
        self.schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, _: out.square().mean())

    def step(self, step, place):
        batch = step.batch(self.data)
        ids, losses = self.data.handed.ids, []
        place("forward")
        self.schedule.step(batch) if self.run.rank == 0 else self.schedule.step(target=batch, losses=losses)
        self.loss = torch.stack(losses).mean() if losses else torch.zeros(())
        place("before vote")
        self.optimizer.step()
        place("after vote")
        return ids


class Experts(Plain):
    """Experts spread over ranks, everything else sharded: tokens go to their experts and come back."""

    def build(self):
        import gpt

        config = gpt.Config(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=8, num_local_experts=4,
        )  # fmt: skip
        self.loss_of = gpt.loss_of
        self.model = gpt.spread_experts(gpt.GPT(config), init_device_mesh("cpu", (self.run.size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        tokens = np.random.default_rng(1).integers(0, 32, (200, 9))
        self.data = Loader(tokens, batch=8, seed=2)
        self.run.track(model=self.model, optimizer=self.optimizer)

    def step(self, step, place):
        batch = step.batch(self.data)
        ids = self.data.handed.ids
        place("forward")
        self.loss = self.loss_of(self.model(batch[:, :-1]), batch[:, 1:])
        self.loss.backward()
        place("before vote")
        self.optimizer.step()
        place("after vote")
        return ids


KINDS = {"plain": Plain, "messy": Messy, "gan": Gan, "sharded": Sharded, "grid": Grid}
KINDS |= {"staged": Staged, "experts": Experts, "hybrid": Hybrid, "adapted": Adapted, "compiled": Compiled}
