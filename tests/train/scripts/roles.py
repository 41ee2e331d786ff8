"""Two trainers, two generators and a judge, who die where they are told to; driven by test_roles.py.

A death is "role rank.generation:place:step", or "trainers:step" for both, who are then not called again.
"""

import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import argosy
from argosy.data import Queue

GROUPS = 6


class Role:
    def __init__(self, directory: Path, steps: int, deaths: tuple[str, ...]) -> None:
        self.directory, self.steps, self.deaths = directory, steps, deaths
        self.rank = argosy.here().rank
        self.me = f"{type(self).__name__.lower()} {self.rank.index}.{self.rank.generation}"

    def place(self, name: str, step: int) -> None:
        """Somewhere in the life of a role: die if this is where it was said."""
        if f"{self.me}:{name}:{step}" in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.me, name) == ("trainer 0.0", "before vote") and f"trainers:{step}" in self.deaths:
            other = (self.directory / "built.1").read_text().split()[-1]
            for pid in (int(other), os.getpid()):
                os.kill(pid, signal.SIGKILL)


class Judge(Role):
    @argosy.endpoint(idempotent=True)
    def score(self, step: int, answers: torch.Tensor) -> torch.Tensor:
        self.place("score", step)
        return answers.square().sum(-1)


class Generator(Role):
    """Puts GROUPS items for each version of the weights; what it puts depends on those and on the key alone."""

    def __init__(self, queue: Queue, *common) -> None:
        super().__init__(*common)
        threading.Thread(target=self.generate, args=[queue], daemon=True).start()

    def generate(self, queue: Queue) -> None:
        weights, done = self.directory / "weights.pt", -1
        while done < self.steps - 1:
            time.sleep(0.005)
            step, state = torch.load(weights) if weights.exists() else (done, {})
            if step == done:
                continue
            for number in range(self.rank.index, GROUPS, 2):
                self.place("before put", step)
                torch.manual_seed(step * GROUPS + number)
                made = torch.randn(8) + state["0.bias"].mean()
                queue.put((step, number, made), key=(step, number))
            self.place("after put", step)
            done = step


class Trainer(Role):
    @argosy.endpoint(idempotent=True)
    def train(self, queue: Queue, judge: "argosy.actors.Actor") -> str:
        with open(self.directory / f"built.{self.rank.index}", "a") as file:
            file.write(f"{os.getpid()}\n")
        run = argosy.Run(self.directory, seed=5, save_every=4)
        model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        self.place("constructor", run.step)
        for step in run.steps(until=self.steps):
            place = (lambda *_: None) if step.rehearsal else self.place
            if run.rank == 0 and not step.rehearsal:
                torch.save((step.number, model.module.state_dict()), self.directory / "weights.new")
                (self.directory / "weights.new").replace(self.directory / "weights.pt")
            with step:
                items = step.batch(queue)
                assert step.rehearsal or {item[0] for item in items} == {step.number}
                answers = torch.stack([item[2] for item in items])
                place("forward", step.number)
                reward = step.once("reward", lambda at=step.number, a=answers: judge.score(at, a).get())
                loss = (model(answers).square().mean(-1) * reward).mean()
                loss.backward()
                place("before vote", step.number)
                optimizer.step()
                place("after vote", step.number)
                run.log(loss=loss)
            if step.committed:
                with open(self.directory / f"items.{self.rank.index}", "a") as file:
                    file.write(f"{step.number} {' '.join(str(item[1]) for item in items)}\n")
        found = run.tracked.state().tensors()
        return hashlib.blake2s(b"".join(found[name].numpy().tobytes() for name in sorted(found))).hexdigest()


def drive(directory: Path, steps: int, *deaths: str) -> list[str]:
    """All of it; returns the digests of the trainers' states."""
    queue = Queue(directory / "queue", batch=GROUPS)
    common = directory, steps, deaths
    with argosy.local() as cluster:
        warm = ["torch", "torch._dynamo", "argosy.data:Queue", "argosy.train:Run"]
        judging, generating, training = (
            cluster.mesh(ranks, restart=argosy.Restart.rank(), preload=warm) for ranks in (1, 2, 2)
        )
        judge = judging.spawn(Judge, *common)[0].options(retry=5)
        generating.spawn(Generator, queue, *common)
        retry = 0 if any(death.startswith("trainers") for death in deaths) else 5
        return training.spawn(Trainer, *common).options(retry=retry).train(queue, judge).gather()
