"""What a snapshot of state on a device costs the training.   save_gpu.py HOME DEVICE

Steps with a snapshot and steps without one come in turns. A step's work is a wait, as that of a GPU is for the process,
which is as long as the copies together where those are emulated: what is lost is what the snapshot adds.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from devices import COPY_S, open_device

from argosy.checkpoint import Saver, restore

home, device = Path(sys.argv[1]), sys.argv[2]
switches = open_device(device)
width, pairs = (4096, 20) if device == "cuda" else (256, 20)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
tensors = 2 * len(list(model.parameters()))
work_s = 2 * tensors * COPY_S


def step(saver: Saver | None, number: int) -> float:
    began = time.monotonic()
    handle = saver.save({"model": model, "optimizer": optimizer}, number) if saver is not None else None
    model(torch.ones(4, width, device=device)).square().mean().backward()
    time.sleep(work_s)
    optimizer.step()
    optimizer.zero_grad()
    if device != "cpu":
        torch.accelerator.synchronize()
    seconds = time.monotonic() - began
    if handle is not None:
        handle.durable.result(300)  # Not part of the step: the next one without a snapshot must be undisturbed.
    return seconds


with Saver(home / "saves") as saver:
    for number in range(3):
        step(saver, number)
        step(None, 0)
    both = [(step(saver, 10 + number), step(None, 0)) for number in range(pairs)]
    wanted = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    began = time.monotonic()
    saver.save({"model": model, "optimizer": optimizer}, 1000).durable.result(300)
    durable_s = time.monotonic() - began
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
restore(home / "saves", into={"model": model, "optimizer": optimizer}, step=1000)
restored = all(torch.equal(p.detach().cpu(), w) for p, w in zip(model.parameters(), wanted, strict=True))
plain_s = statistics.median(without for _, without in both)
lost = statistics.median(saved - without for saved, without in both) / plain_s
size = 2 * sum(parameter.nbytes for parameter in model.parameters())
found = {"lost": lost, "step_s": plain_s, "tensors": tensors, "durable_s": durable_s, "bytes": size}
samples = [[round(each, 5) for each in pair] for pair in both]
(home / "found.json").write_text(json.dumps({**found, "restored": restored, "steps_s": samples}))
