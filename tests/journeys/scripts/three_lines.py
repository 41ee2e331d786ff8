"""A GPT of transformers under FSDP2 and plain torchrun; what Argosy adds is three lines."""

import hashlib
import os
import sys
import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel

from argosy.checkpoint import Saver, StepNotFound, restore

directory, until = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
shape = {"n_layer": 2, "n_head": 2, "n_embd": 18, "vocab_size": 50, "n_positions": 32}
model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
for module in (*model.transformer.h, model):
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state, step = {"model": model, "optimizer": optimizer}, 0


def say(word: str) -> None:
    """With a digest of everything, whole: every rank gathers, rank 0 speaks."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        for tensor in (parameter.detach(), *(v for _, v in sorted(optimizer.state.get(parameter, {}).items()))):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(name.encode() + whole.numpy().tobytes())
    if dist.get_rank() == 0:
        print(word, step, found.hexdigest(), flush=True)


saver = Saver(directory)
with suppress(StepNotFound):
    step = restore(directory, into=state).step
say("begins")
while step < until:
    tokens = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(step))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    saver.save(state, step).wait(60)
    say("durable")
if len(sys.argv) > 3:  # Wait to be killed.
    time.sleep(100)
saver.close()
dist.destroy_process_group()
os._exit(0)
