"""A training made of parts that are named, whose ranks die where they are told to.

program.py DIRECTORY STEPS PARTS [RANK.GENERATION:PLACE:STEP]...

PARTS is a list with commas: one of `plain` (each rank trains its own), `averaged` (the script itself averages
gradients), `ddp`, `replicate`, `fsdp`, and any of those below. A part with a number is used every so many steps:
`late5` in steps 4, 9, and so on. The place `doubt` of rank 0 is no death: it does not hear how that vote ends. The
place `over` is behind the loop.
"""

import os
import re
import signal
import sys

import kinds
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import argosy
from argosy.collective import rendezvous, torch_work
from argosy.data import Loader, Queue

directory, steps, text, *deaths = sys.argv[1:]
parts = dict(re.fullmatch(r"([a-z]+)(\d*)", part).groups() for part in text.split(","))
if "apart" in parts:  # As if each rank were on another host: Gloo carries everything, also the votes.
    rendezvous.host_id = lambda: f"host {os.environ['RANK']}"
run = argosy.Run(directory, seed=5, save_every=4)
me = f"{run.rank}.{run.crew.generation}"


doubts = [int(death.split(":")[2]) for death in deaths if death.startswith(f"{me}:doubt:")]
if doubts:
    hear = torch_work.Patience.poll

    def mishear(self, work):
        """Gloo carries the vote of a step to its end, then loses the connection before this rank knows."""
        hear(self, work)
        if self.what.startswith("vote ") and run.step in doubts and run.crew.tried == 1:
            raise RuntimeError("Connection closed by peer")

    torch_work.Patience.poll = mishear
seen = dict[tuple[str, int], object]()


def place(name: str, step) -> None:
    """Die, if that was asked for: PLACE is "redone NAME" in later attempts of this process at the step."""
    again = seen.setdefault((name, step.number), step) is not step
    if not step.rehearsal and f"{me}:{'redone ' * again}{name}:{step.number}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


def due(part: str, step) -> bool:
    return part in parts and (step.number + 1) % int(parts[part] or 1) == 0


def wrap(module: nn.Module) -> nn.Module:
    if "equal" in parts:  # All shards of a weight begin equal; dropout makes them different.
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.1)
    if run.size == 1 or "plain" in parts or "averaged" in parts:
        return module
    if "ddp" in parts:
        return kinds.wrapped(run, module)
    shard = replicate if "replicate" in parts else fully_shard
    for layer in module:
        if isinstance(layer, nn.Linear):
            shard(layer)
    return shard(module)


class Model(nn.Module):
    """Everything that is trained: what all ranks share, and the parts that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        width = 1 << int(parts.get("wide") or 16)  # 2^16: 10 MB with its moments.
        wide = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
        self.body = wrap(wide if "wide" in parts else kinds.network(norm="norm" in parts))
        self.critic = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))) if "critic" in parts else None
        self.expert = nn.Linear(4, 4) if "expert" in parts else None  # Each rank trains its own.
        self.stamp = fully_shard(nn.Linear(1, 6, bias=False)) if "stamp" in parts else None

    def forward(self, batch):
        out = self.body(batch)
        if self.stamp is not None:
            out = out + 0.0 * self.stamp(torch.ones(1)).sum()
        return out if self.expert is None else out + self.expert(out)


model = Model()


def make(parameters):
    if "zero" in parts and run.size > 1:  # Each rank has the moments of some parameters.
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)
    if "sgd" in parts:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01)


trained = [p for module in (model.body, model.expert) if module is not None for p in module.parameters()]
half = len(trained) // 2 if "two" in parts else len(trained)
optimizers = {"first": make(trained[:half])}
if "two" in parts:
    optimizers["second"] = make(trained[half:])
if model.critic is not None:
    optimizers["critics"] = make(model.critic.parameters())
if model.stamp is not None:
    nn.init.zeros_(model.stamp.weight)
    optimizers["stamps"] = torch.optim.SGD(model.stamp.parameters(), lr=0.1)
things = {"model": model, **optimizers}
if "schedule" in parts:
    things["schedule"] = torch.optim.lr_scheduler.StepLR(optimizers["first"], 3, 0.5)
if "ema" in parts:
    inner = model.body.module if hasattr(model.body, "module") else model.body
    things["ema"] = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled="scaler" in parts)
if "scaler" in parts:
    things["scaler"] = scaler
if run.size > 1 and "undeclared" not in parts:
    things["own"] = [model] if "plain" in parts else [] if model.expert is None else [model.expert]
    things["replicated"] = [each for each in (model.body, model.critic) if each is not None and "averaged" in parts]
run.track(**things)
if "queue" in parts:
    data = Queue(f"{directory}/queue", 12, micro=2 if "micro" in parts else None, capacity=1000)
    for number in range(12 * int(steps) if run.rank == 0 else 0):
        data.put(kinds.SAMPLES[number], key=number)
else:
    data = Loader(kinds.SAMPLES, batch=24, micro=2 if "micro" in parts else None, seed=2)


def nudge(value) -> None:
    """Change the weights by a value that all ranks have."""
    with torch.no_grad():
        for parameter in model.body.parameters():
            parameter.add_(float(value) * 1e-3)


def made_once(step) -> float:
    """A value that would be another one if it were made again; of replicas, which may go back to disk, it would not."""
    path = f"{directory}/once.{run.rank}"

    def make() -> float:
        if "random" in parts:
            return int.from_bytes(os.urandom(4)) / 2**31
        with open(path, "a+") as file:
            file.seek(0)
            before = file.read().split().count(str(step.number))
            file.write(f"{step.number} " if not step.rehearsal else "")
        return 1.0 + 0.25 * before if "fsdp" in parts or "plain" in parts else 1.5

    factor = step.once("factor", make)
    if "random" in parts and not step.rehearsal:
        with open(path, "a") as file:
            file.write(f"{step.number} {factor}\n")
    return factor


def average(module: nn.Module) -> None:
    for parameter in module.parameters() if "averaged" in parts and run.size > 1 else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= run.size


def stamp() -> None:
    """Give all cells of a sharded parameter a gradient that no other attempt has."""
    value = torch.tensor(int.from_bytes(os.urandom(2)) / 2**16)
    dist.broadcast(value, 0)
    model.stamp.weight.grad.to_local().fill_(float(value))


def forward_and_backward(step) -> torch.Tensor:
    loss = torch.zeros(())
    for batch in step.batches(data):
        place("forward", step)
        if "queue" in parts:
            batch = torch.tensor(np.array(batch))
        if "once" in parts:
            batch = batch * made_once(step)
        loss = model(batch).square().mean() * step.scale
        scaler.scale(loss).backward()
    average(model.body)
    if "stamp" in parts:
        stamp()
    place("reduced", step)
    return loss.detach()


def spoil(step, optimizer) -> None:
    """Gradients that are not finite, for the optimizer that steps last."""
    for parameter in optimizer.param_groups[0]["params"] if due("nan", step) else ():
        parameter.grad = parameter.grad * float("inf")


def exchange(step, loss) -> None:
    """What the script does after its update."""
    for part in ("late", "background"):
        if due(part, step):
            mean = loss.clone()
            work = dist.all_reduce(mean, async_op=part == "background")
            if work is not None:
                work.wait()
            nudge(mean)
    if due("messages", step):
        told = torch.zeros(())
        for to, come in ((run.rank + 1, None), (None, run.rank - 1))[:: -1 if run.rank else 1]:
            if to is not None:
                dist.send(torch.tensor(step.number + 1.0), to % run.size)
            else:
                dist.recv(told, come % run.size)
        nudge(told)
    if due("critic", step):
        model.critic(model.body(torch.ones(3, 8))).mean().backward()
        average(model.critic)
        spoil(step, optimizers["critics"])
        place("critic", step)
        optimizers["critics"].step()


for step in run.steps(until=int(steps)):
    with step:
        loss = forward_and_backward(step)
        run.log(loss=loss)
        if model.critic is None:
            spoil(step, next(reversed(optimizers.values())))
        for optimizer in [each for name, each in optimizers.items() if name != "critics"]:
            place("before vote", step)
            scaler.step(optimizer)
            place("after vote", step)
        scaler.update()
        exchange(step, loss)
        if "schedule" in things:
            things["schedule"].step()
        if "ema" in things:
            things["ema"].update_parameters(inner)
        run.state["count"] = run.state.get("count", 0) + 1
        place("end", step)
        run.log(**{"end": step.number} if "nan" not in parts else {})  # A step that is skipped need not come so far.
if f"{me}:over:{run.step - 1}" in deaths:
    os.kill(os.getpid(), signal.SIGKILL)
if wrong := [name for name, tensor in run.tracked.state().tensors().items() if not tensor.isfinite().all()]:
    print("numbers that are not finite:", *wrong, flush=True)
if "stamp" in parts:
    stamps = run.crew.gather(model.stamp.weight.to_local().flatten().tolist())
    print("stamps", *{value for cells in stamps for value in cells}, flush=True)
kinds.end(run, without="stamp")
