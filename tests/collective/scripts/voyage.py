"""A training loop that outlives its ranks, and the supervisor that replaces them; run by test_voyages.py.

    python voyage.py WRAPPER SIZE SEED...

Each seed says who dies where. For each it prints the digest of the final state, how many ranks were replaced,
and `kept` if survivors kept pid and group object. Seed 0 is the undisturbed voyage.
"""

import copy
import faulthandler
import hashlib
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from collections import namedtuple
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from argosy.collective import Superseded, joining, layout_of
from argosy.core import DeadlinePassed, PeerLost

STEPS = 6
PLACES = ["forward", "backward", "collective", "vote", "applied", "reform", "healing"]


class Fates:
    """Who dies, at which step (or generation), where."""

    def __init__(self, seed, size):
        chance = random.Random(seed)
        count = 0 if seed == 0 else chance.choice([1, 1, 2]) if size > 2 else 1
        victims = [0] if seed % 5 == 1 else chance.sample(range(size), count) if count else []
        at = chance.randrange(STEPS)
        self.plan = {victim: (at, chance.choice(PLACES)) for victim in victims}
        if any(place in ("reform", "healing") for _, place in self.plan.values()) and len(victims) < 2 and size > 2:
            # Somebody must have died before for others to die while they re-form.
            self.plan[next(r for r in range(size) if r not in victims)] = (at, "backward")
        self.delay = chance.uniform(0, 0.004)

    def kill(self, rank, life, step, place):
        if life == 0 and self.plan.get(rank) == (step, place):
            if place != "collective":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


def build(wrapper):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    if wrapper == "fsdp2":
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        fully_shard(model[0]), fully_shard(model[3])
        return fully_shard(model)
    return DDP(model, bucket_cap_mb=0.001)


Ship = namedtuple("Ship", "wrapper size port directory fates")


class Sailor:
    """One rank."""

    def __init__(self, ship, rank, life, store):
        wrapper, size, self.fates = ship.wrapper, ship.size, ship.fates
        self.wrapper, self.rank, self.life, self.store = wrapper, rank, life, store
        self.kept = Path(ship.directory, f"kept{rank}")
        with joining():
            dist.init_process_group("argosy", store=store, rank=rank, world_size=size)
        self.group = dist.group.WORLD
        self.model = build(wrapper)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        self.step = 0
        first = self.local(), copy.deepcopy(self.model.state_dict())
        self.group.rehearse(lambda: self.loss(0).backward())
        self.optimizer.zero_grad()
        self.model.load_state_dict(first[1])
        self.set_local(first[0])
        for p in self.model.parameters():  # Adam makes its state in its first step; a newcomer needs it before
            p.grad = torch.zeros_like(p)
        before = copy.deepcopy(self.model.state_dict())
        self.optimizer.step()
        self.model.load_state_dict(before)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.optimizer.zero_grad()
        if life == 0:
            self.keep(0)

    def loss(self, step):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step * 100 + self.rank))
        return self.model(x).square().mean()

    def local(self):
        """What is this rank's alone: random state and buffers; for FSDP2 its shards too."""
        sharded = [p.to_local().detach().clone() for p in self.model.parameters()] if self.wrapper == "fsdp2" else []
        moments = copy.deepcopy(self.optimizer.state_dict()) if self.wrapper == "fsdp2" else None
        return torch.get_rng_state(), [b.clone() for b in self.model.buffers()], sharded, moments

    def set_local(self, local):
        random_state, buffers, sharded, moments = local
        torch.set_rng_state(random_state)
        with torch.no_grad():
            for mine, value in zip(self.model.buffers(), buffers, strict=True):
                mine.copy_(value)
            for mine, value in zip(self.model.parameters(), sharded, strict=False):
                mine.to_local().copy_(value)
        if moments is not None:
            self.optimizer.load_state_dict(moments)

    def keep(self, step):
        """Leave a copy outside of this process; the last two stay."""
        Path(f"{self.kept}.{step}.tmp").write_bytes(pickle.dumps(self.local()))
        os.rename(f"{self.kept}.{step}.tmp", f"{self.kept}.{step}")

    def newest(self):
        return max(int(p.suffix[1:]) for p in self.kept.parent.glob(f"{self.kept.name}.*") if p.suffix != ".tmp")

    def sail(self):
        while self.step < STEPS:
            before = self.local()
            with self.group.latched() as latch:
                self.optimizer.zero_grad()
                self.fates.kill(self.rank, self.life, self.step, "forward")
                loss = self.loss(self.step)
                self.fates.kill(self.rank, self.life, self.step, "collective")
                hook = next(iter(self.model.parameters())).register_hook(
                    lambda g: self.fates.kill(self.rank, self.life, self.step, "backward")
                )
                loss.backward()
                hook.remove()
                if self.wrapper == "ddp":
                    self.keep(self.step + 1)  # what is local does not change by applying
                self.fates.kill(self.rank, self.life, self.step, "vote")
                latch.vote(self.optimizer.step)
            if latch.committed:
                self.step += 1
                self.fates.kill(self.rank, self.life, self.step - 1, "applied")
                if self.wrapper == "fsdp2":
                    self.keep(self.step)
            else:
                hook.remove()
                self.set_local(before)
                self.heal(newcomer=False)

    def newer(self, generation):
        return int(self.store.get("generation")) > generation

    def heal(self, newcomer):
        while True:
            generation = int(self.store.get("generation"))
            if self.group.generation >= generation:
                time.sleep(0.002)
                continue
            try:
                self.fates.kill(self.rank, self.life, self.step, "reform") if generation > 1 else None
                layout = layout_of(self.model) if self.wrapper == "ddp" else ""
                self.group.reform(None, generation, layout=layout, give_up=partial(self.newer, generation))
                self.fates.kill(self.rank, self.life, self.step, "healing") if generation > 1 else None
                return self.heal_replicated(newcomer) if self.wrapper == "ddp" else self.heal_sharded()
            except (PeerLost, DeadlinePassed, Superseded):
                continue

    def heal_replicated(self, newcomer):
        """All take step and state of the lowest survivor; what is local comes from the own copy."""
        told = [None] * self.group.size()
        dist.all_gather_object(told, None if newcomer else self.step)
        source, step = next((r, s) for r, s in enumerate(told) if s is not None)
        state = [self.model.state_dict(), self.optimizer.state_dict()] if self.rank == source else [None, None]
        dist.broadcast_object_list(state, source)
        dist.barrier()
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])
        self.step = step
        if newcomer:
            self.set_local(pickle.loads(Path(f"{self.kept}.{step}").read_bytes()))

    def heal_sharded(self):
        """All go back to the newest step of which every rank has a copy."""
        told = [None] * self.group.size()
        dist.all_gather_object(told, self.newest())
        dist.barrier()
        self.step = min(told)
        self.set_local(pickle.loads(Path(f"{self.kept}.{self.step}").read_bytes()))

    def digest(self):
        seen = hashlib.blake2s(digest_size=6)
        for p in [*self.model.parameters(), *self.model.buffers()]:
            seen.update((p.full_tensor() if self.wrapper == "fsdp2" else p).detach().numpy().tobytes())
        return seen.hexdigest()


def rank_main(ship, rank, life):
    faulthandler.enable()
    size, directory = ship.size, ship.directory
    client = dist.TCPStore("127.0.0.1", ship.port, None, False, wait_for_workers=False)
    sailor = Sailor(ship, rank, life, client)
    identity = os.getpid(), id(dist.group.WORLD)
    told = [None] * size
    sailor.heal(newcomer=life > 0)
    while True:
        sailor.sail()
        try:  # a rank may also die after its last step
            dist.all_gather_object(told, sailor.digest())
            dist.barrier()
            break
        except PeerLost:
            sailor.heal(newcomer=False)
    assert identity == (os.getpid(), id(dist.group.WORLD))
    if rank == 0:
        Path(directory, "result").write_text(" ".join(sorted(set(told))))
    client.set(f"end{rank}", "")
    for other in range(size):
        client.wait([f"end{other}"])


def open_store():
    """A store in a process of its own: one with the store's threads must not fork ranks."""
    lifeline, told = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(lifeline[1])
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(told[1], str(server.port).encode())
        os.read(lifeline[0], 1)  # until all others are gone
        os._exit(0)
    os.close(lifeline[0])
    return int(os.read(told[0], 10)), lifeline[1]


def supervise(wrapper, size, seed):
    """Fork the ranks, replace those that are killed; returns the digests and how many were replaced."""
    port, lifeline = open_store()
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    store.set("generation", "1")
    fates, pids, lives = Fates(seed, size), {}, [0] * size
    deadline = time.monotonic() + float(os.environ.get("VOYAGE_S", "60"))
    with tempfile.TemporaryDirectory() as directory:
        ship = Ship(wrapper, size, port, directory, fates)

        def start(rank):
            pid = os.fork()
            if pid:
                pids[pid] = rank
                return
            code = 1
            try:
                rank_main(ship, rank, lives[rank])
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(code)

        for rank in range(size):
            start(rank)
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.monotonic() > deadline:
                    for left in pids:
                        os.kill(left, signal.SIGABRT)
                    print(f"HANG seed {seed} {fates.plan}", flush=True)
                    sys.exit(1)
                time.sleep(0.002)
                continue
            rank = pids.pop(pid, None)
            if rank is None:
                continue
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                lives[rank] += 1
                store.add("generation", 1)
                start(rank)
            elif status:
                print(f"FAILED seed {seed} rank {rank} {fates.plan} status {status}", flush=True)
                for left in pids:
                    os.kill(left, signal.SIGKILL)
                sys.exit(1)
        os.close(lifeline)
        return Path(directory, "result").read_text(), sum(lives)


def main():
    torch.set_num_threads(1)
    wrapper, size = sys.argv[1], int(sys.argv[2])
    for seed in map(int, sys.argv[3:]):
        began = time.monotonic()
        digest, replaced = supervise(wrapper, size, seed)
        print(seed, digest, replaced, f"{time.monotonic() - began:.2f}s", flush=True)


if __name__ == "__main__":
    main()
