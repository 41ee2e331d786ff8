"""Train the model of gpt.py with each of torch's parallelisms, on Argosy's process groups.

    python examples/parallel.py alone               one process
    python examples/parallel.py moe                 one process, a mixture of experts
    argosy run -n 2 examples/parallel.py ddp        replicas
    argosy run -n 2 examples/parallel.py fsdp       sharded
    argosy run -n 4 examples/parallel.py fsdp_tp    sharded over 2 ranks, each shard split over 2
    argosy run -n 2 examples/parallel.py pipeline   a stage per rank
    argosy run -n 2 examples/parallel.py experts    the mixture, with two of its four experts on each rank

Two more arguments are optional: the number of steps, and a directory for the weights in the format of transformers.
Takes seconds. All variants train on the same batches: expect the losses and gradient norms of `alone` or `moe`, up to
rounding.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Config, loss_of, pipeline, shard, shard_and_split, spread_experts, weights_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

WAYS = ["alone", "moe", "ddp", "fsdp", "fsdp_tp", "pipeline", "experts"]
ROWS, MICROBATCHES = 16, 4
Backward = Callable[[Tensor, Tensor], Tensor]
"""Takes a global batch, leaves gradients, returns the loss on the whole batch."""


def by_rows(model: nn.Module, place: int = 0, places: int = 1) -> Backward:
    """Each rank of the data dimension takes its rows; the wrapper averages the gradients."""

    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model(x.chunk(places)[place]), y.chunk(places)[place])
        loss.backward()
        return averaged(loss.detach()) if dist.is_initialized() else loss.detach()

    return backward


def averaged(loss: Tensor) -> Tensor:
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss


def spread(how: str, model: GPT) -> tuple[nn.Module, Backward]:
    """What this rank trains, and how a batch goes through it."""
    if how in ("alone", "moe"):
        return model, by_rows(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    if how == "ddp":
        return model, by_rows(DistributedDataParallel(model), rank, size)
    if how == "fsdp_tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        return model, by_rows(shard_and_split(model, mesh), mesh.get_local_rank("data"), size // 2)
    mesh = init_device_mesh("cpu", (size,))
    if how == "fsdp":
        return model, by_rows(shard(model, mesh), rank, size)
    if how == "experts":
        return model, by_rows(spread_experts(model, mesh), rank, size)
    stage, schedule = pipeline(model, mesh, rows=ROWS, microbatches=MICROBATCHES)

    def backward(x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = [x] if rank == 0 else []
        schedule.step(*inputs, target=y, losses=losses) if rank == size - 1 else schedule.step(*inputs)
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(loss, size - 1)
        return loss

    return stage, backward


def clip(parameters: Iterable[nn.Parameter], over_stages: bool) -> Tensor:
    """Clip by the norm of all gradients, wherever they are, and return it."""
    parameters = list(parameters)
    norm = get_total_norm([each.grad for each in parameters if each.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if over_stages:
        dist.all_reduce(square := norm.square())
        norm = square.sqrt()
    clip_grads_with_norm_(parameters, 1.0, norm)
    return norm


def main(how: str = "alone", steps: str = "20", directory: str = "") -> None:
    if how not in WAYS:
        raise SystemExit(f"{__doc__}\nnot one of {', '.join(WAYS)}: {how}")
    if how not in ("alone", "moe"):
        import argosy.collective  # noqa: F401, it registers the backend

        dist.init_process_group("argosy")
    torch.manual_seed(0)
    config = Config(num_local_experts=4 if how in ("moe", "experts") else 0)
    trained, backward = spread(how, GPT(config))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(__file__).with_name("gpt.py").read_bytes()))
    draw, length = torch.Generator().manual_seed(0), config.max_position_embeddings
    loud = not dist.is_initialized() or dist.get_rank() == 0
    for step in range(int(steps)):
        starts = torch.randint(len(text) - length, (ROWS,), generator=draw)
        windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        loss = backward(windows[:, :-1], windows[:, 1:])
        norm = clip(trained.parameters(), over_stages=how == "pipeline")
        optimizer.step()
        optimizer.zero_grad()
        if loud:
            print(f"step {step} loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)
    if directory:
        write(Path(directory), config, weights_of(trained))
    if dist.is_initialized():
        dist.destroy_process_group()


def write(directory: Path, config: Config, weights: dict[str, Tensor]) -> None:
    from gpt_hf import save_hf  # here, because it needs safetensors

    every = [weights]
    if dist.is_initialized():  # stages have each their own
        every *= dist.get_world_size()
        dist.gather_object(weights, every if dist.get_rank() == 0 else None)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_hf(directory, config, {name: weight for each in every for name, weight in each.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
