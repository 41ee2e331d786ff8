"""FSDP2 in the shape of pytorch/examples: blocks are sharded one by one, then the root; the state is saved with DCP."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", action="store_true")
    args = parser.parse_args()
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.mixed_precision else MixedPrecisionPolicy()
    for module in (*model.layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = torch.zeros(())
    for step in range(6):
        tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step * world + rank))
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f} norm {norm.full_tensor().item():.5f}", flush=True)
        else:
            norm.full_tensor()
    place = [tempfile.mkdtemp()] if rank == 0 else [""]
    dist.broadcast_object_list(place)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=place[0])
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=place[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    dist.all_reduce(loss)
    if rank == 0:
        print("RESULT", f"{loss.item():.6f}", len([*Path(place[0]).iterdir()]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
