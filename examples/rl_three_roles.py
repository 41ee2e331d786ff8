"""A small GRPO: two trainers, two generators, one judge. One of each is killed, and the final weights are the same.

    python examples/rl_three_roles.py          # kills a generator, a trainer and the judge
    python examples/rl_three_roles.py calm     # kills nobody

Takes some seconds. Expect the same weights from both, and about "reward 0.13, after 40 steps 0.99".
"""

import hashlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

import argosy
from argosy.data import Queue
from argosy.train import read_log

PROMPTS, LENGTH, GROUP, STEPS, WEIGHTS = 8, 3, 16, 40, Path("runs/rl/weights.pt")


def policy() -> nn.Module:  # Answers a number with three; right is the next one, three times.
    return nn.Sequential(nn.Embedding(PROMPTS, 32), nn.ReLU(), nn.Linear(32, 24), nn.Unflatten(-1, (LENGTH, PROMPTS)))


class Judge:
    @argosy.endpoint(idempotent=True)
    def score(self, prompts: Tensor, answers: Tensor) -> Tensor:
        return (answers == (prompts[:, None, None] + 1) % PROMPTS).float().mean(-1)


class Generator:  # Begins by itself, and again when it is replaced.
    def __init__(self, queue: Queue) -> None:
        threading.Thread(target=self.generate, args=[queue], daemon=True).start()

    def generate(self, queue: Queue) -> None:
        model, place, done = policy(), argosy.here(), -1
        while done < STEPS - 1:
            time.sleep(0.005)
            step, state = torch.load(WEIGHTS) if WEIGHTS.exists() else (done, {})
            if step == done:
                continue
            model.load_state_dict(state)
            for prompt in torch.arange(place.rank.index, PROMPTS, place.size):
                torch.manual_seed(step * PROMPTS + int(prompt))
                answers = Categorical(logits=model(prompt)).sample((GROUP,))
                queue.put((prompt, answers), key=(done := step, int(prompt)))  # Once, however often it is generated.


class Trainer:
    @argosy.endpoint(idempotent=True)
    def train(self, queue: Queue, judge: Any) -> str:
        run = argosy.Run("runs/rl", seed=0, save_every=10)
        model = DDP(policy())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(until=STEPS):
            if run.rank == 0 and not step.rehearsal:
                torch.save((step.number, model.module.state_dict()), WEIGHTS.with_suffix(".new"))
                WEIGHTS.with_suffix(".new").replace(WEIGHTS)
            with step:
                prompts, answers = map(torch.stack, zip(*step.batch(queue), strict=True))
                reward = step.once("reward", lambda p=prompts, a=answers: judge.score(p, a).get())
                advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
                chances = Categorical(logits=model(prompts)[:, None]).log_prob(answers).sum(-1)
                (-advantage * chances).mean().backward()
                optimizer.step()
                run.log(reward=reward.mean())
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:8]


def kill(victims: list[int]) -> None:
    for number, victim in enumerate(victims, 1):
        while len(read_log("runs/rl")) < 8 * number:
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)


if __name__ == "__main__":
    shutil.rmtree("runs/rl", ignore_errors=True)
    queue = Queue("runs/rl/queue", batch=PROMPTS)
    with argosy.local() as cluster:
        meshes = [cluster.mesh(ranks, restart=argosy.Restart.rank()) for ranks in (2, 2, 1)]
        victims = [mesh.run(os.getpid).gather()[-1] for mesh in meshes] if "calm" not in sys.argv else []
        threading.Thread(target=kill, args=[victims], daemon=True).start()
        meshes[0].spawn(Generator, queue)
        judge = meshes[2].spawn(Judge)[0].options(retry=5)
        print("weights", *meshes[1].spawn(Trainer).options(retry=5).train(queue, judge).gather())
    rows = [row.values["reward"] for row in read_log("runs/rl")]
    print(f"reward {rows[0]:.2f}, after {len(rows)} steps {rows[-1]:.2f}")
