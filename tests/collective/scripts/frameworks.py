"""What people build on process groups; each piece prints a number that must not depend on the backend."""

# ruff: noqa: F821 (names that the crew gives)
import tempfile

import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

form(round)
print("backend", dist.get_backend())


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8))


def train(model, shard, steps=4, clip=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(shard)
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator)
        loss = (model(x) - y).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5) if clip else torch.zeros(())
        optimizer.step()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    total = torch.stack([loss.detach(), norm])
    dist.all_reduce(total)
    return total.tolist()


print("ddp", *train(DDP(network()), rank, clip=True))
print("ddp view", *train(DDP(network(), gradient_as_bucket_view=True, bucket_cap_mb=0.01), rank))
print("ddp unused", *train(DDP(network(), find_unused_parameters=True), rank))
if size == 2:  # compiling is dear
    print("ddp compiled", *train(torch.compile(DDP(network()), backend="eager"), rank))

flat = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def sharded(mesh):
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


model = sharded(flat)
print("fsdp2", *train(model, rank, clip=True))
if size == 4:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    print("hsdp", *train(sharded(grid), rank))

with tempfile.TemporaryDirectory() as directory:
    shared = [directory]
    dist.broadcast_object_list(shared, 0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=shared[0])
    other = sharded(flat)
    dcp.load({"model": other.state_dict()}, checkpoint_id=shared[0])
    for mine, read in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.to_local(), read.to_local())
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=shared[0] + "/later").result()
    dcp.load({"model": other.state_dict()}, checkpoint_id=shared[0] + "/later")
    dist.barrier()
whole = network(seed=rank)
full = whole.state_dict() if rank == 0 else {}
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(whole, full, options=options)
print("from rank 0", sum(p.sum().item() for p in whole.parameters()))

tp = parallelize_module(network(), flat, {"0": ColwiseParallel(), "2": RowwiseParallel()})
print("tp", *train(tp, 0))
x = distribute_tensor(torch.arange(24.0).reshape(4 * 3, 2), flat, [Shard(0)])
print("redistribute", *x.redistribute(flat, [Replicate()]).to_local().flatten().tolist())
print("redistribute", float(x.redistribute(flat, [Shard(1)]).to_local().sum() + x.full_tensor().sum()))

stages = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(size)])
torch.manual_seed(1)
for p in stages.parameters():
    nn.init.normal_(p, std=0.2)
stage = PipelineStage(stages[rank], rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=2 * size, loss_fn=lambda out, y: (out - y).square().mean())
torch.manual_seed(2)
x, y = torch.randn(4 * size, 16), torch.randn(4 * size, 16)
losses = []
if rank == 0:
    schedule.step(x)
elif rank == size - 1:
    schedule.step(target=y, losses=losses)
else:
    schedule.step()
grads = torch.stack([p.grad.norm() for p in stages[rank].parameters()]).sum()
dist.all_reduce(grads)
print("1f1b", grads.item(), *(loss.item() for loss in losses))

# A mixture of experts: tokens go to the rank of their expert and back.
torch.manual_seed(rank)
tokens = torch.randn(36, 4)
expert = torch.randint(0, size, (36,))
order = expert.argsort(stable=True)
counts = torch.bincount(expert, minlength=size)
taken = torch.empty_like(counts)
dist.all_to_all_single(taken, counts)
inbox = torch.empty(int(taken.sum()), 4)
dist.all_to_all_single(inbox, tokens[order], taken.tolist(), counts.tolist())
back = torch.empty(36, 4)
dist.all_to_all_single(back, inbox * (rank + 1), counts.tolist(), taken.tolist())
print("moe", back.sum().item(), functional.all_to_all_single(back, None, None, dist.group.WORLD).sum().item())


@torch.compile(backend="aot_eager")
def compiled(x):
    return (
        functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        + functional.all_gather_tensor(x, 0, dist.group.WORLD).sum()
    )


if size == 2:
    print("compiled", compiled(torch.full((4,), float(rank))).sum().item())
print("scattered", functional.reduce_scatter_tensor(torch.arange(4.0 * size), "sum", 0, dist.group.WORLD).sum().item())
dist.barrier()
dist.destroy_process_group()
