"""A training made of parts that are named, whose ranks die where they are told to.

program.py DIRECTORY STEPS PARTS [RANK.GENERATION:PLACE:STEP]...

PARTS is a list with commas: one of `plain`, `ddp`, `replicate`, `fsdp`, and any of those below. A part with a number
is used every so many steps: `late5` in steps 4, 9, and so on.
"""

import os
import re
import signal
import sys

import kinds
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import argosy
from argosy.collective import rendezvous, transport
from argosy.data import Loader

directory, steps, text, *deaths = sys.argv[1:]
parts = dict(re.fullmatch(r"([a-z]+)(\d*)", part).groups() for part in text.split(","))
if "apart" in parts:  # As if each rank were on another host: Gloo carries everything, also the votes.
    rendezvous.host_id = lambda: f"host {os.environ['RANK']}"
run = argosy.Run(directory, seed=5, save_every=4)
me = f"{run.rank}.{run.crew.generation}"


if "doubt" in parts and me == "0.0":
    hear = transport.Transport._await

    def mishear(self, work, plan, deadline):
        """Gloo carries the vote of a step to its end, then loses the connection before this rank knows."""
        hear(self, work, plan, deadline)
        if plan.name == "vote" and run.step == int(parts["doubt"]) and run.crew.tried == 1:
            raise RuntimeError("Connection closed by peer")

    transport.Transport._await = mishear
seen = set[tuple[str, int]]()


def place(name: str, step) -> None:
    """Die, if that was asked for: PLACE is "redone NAME" when this process is there in the step for the second time."""
    again = (name, step.number) in seen
    if not step.rehearsal and f"{me}:{'redone ' * again}{name}:{step.number}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    seen.add((name, step.number))


def due(part: str, step) -> bool:
    return part in parts and (step.number + 1) % int(parts[part] or 1) == 0


def wrap(module: nn.Module) -> nn.Module:
    if "equal" in parts:  # All shards of a weight begin equal; dropout makes them different.
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.1)
    if run.size == 1 or "plain" in parts:
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
        wide = nn.Sequential(nn.Linear(8, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 4))  # 10 MB with its moments.
        self.body = wrap(wide if "wide" in parts else kinds.network(norm="norm" in parts))
        self.critic = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))) if "critic" in parts else None
        self.expert = nn.Linear(4, 4) if "expert" in parts else None  # Each rank trains its own.

    def forward(self, batch):
        out = self.body(batch)
        return out if self.expert is None else out + self.expert(out)


model = Model()


def make(parameters):
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
things = {"model": model, **optimizers}
if "schedule" in parts:
    things["schedule"] = torch.optim.lr_scheduler.StepLR(optimizers["first"], 3, 0.5)
if "ema" in parts:
    inner = model.body.module if hasattr(model.body, "module") else model.body
    things["ema"] = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled="scaler" in parts)
if "scaler" in parts:
    things["scaler"] = scaler
if "expert" in parts and "undeclared" not in parts and run.size > 1:
    things["own"] = [model.expert]
stamped = list(model.body.parameters())[-1]
if "stamp" in parts:
    nn.init.zeros_(stamped)
run.track(**things)
data = Loader(kinds.SAMPLES, batch=24, micro=2 if "micro" in parts else None, seed=2)


def nudge(value) -> None:
    """Change the weights by a value that all ranks have."""
    with torch.no_grad():
        for parameter in model.body.parameters():
            parameter.add_(float(value) * 1e-3)


def made_once(step) -> float:
    factor = step.once("factor", lambda: int.from_bytes(os.urandom(4)) / 2**31 if "random" in parts else 1.5)
    if not step.rehearsal:
        with open(f"{directory}/once.{run.rank}", "a") as file:
            file.write(f"{step.number} {factor}\n")
    return factor


def stamp() -> None:
    """Give all cells of a sharded parameter a gradient that no other attempt has."""
    value = torch.tensor(int.from_bytes(os.urandom(2)) / 2**16)
    dist.broadcast(value, 0)
    stamped.grad.to_local().fill_(float(value))


def forward_and_backward(step) -> torch.Tensor:
    loss = torch.zeros(())
    for batch in step.batches(data):
        place("forward", step)
        if "once" in parts:
            batch = batch * made_once(step)
        loss = model(batch).square().mean() * step.scale
        scaler.scale(loss).backward()
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
    if due("messages", step) and run.rank == 0:
        for peer in range(1, run.size):
            dist.send(loss, peer)
        nudge(loss)
    elif due("messages", step):
        dist.recv(told := torch.zeros(()), 0)
        nudge(told)
    if due("critic", step):
        model.critic(model.body(torch.ones(3, 8))).mean().backward()
        spoil(step, optimizers["critics"])
        place("critic", step)
        optimizers["critics"].step()


for step in run.steps(until=int(steps)):
    with step:
        loss = forward_and_backward(step)
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
        run.log(loss=loss)
if "stamp" in parts:
    stamps = run.crew.gather(stamped.to_local().tolist())
    print("stamps", *{value for cells in stamps for value in cells}, flush=True)
kinds.end(run)
