"""A training loop that outlives its ranks, and the supervisor that replaces them; run by test_voyages.py.

    python voyage.py WRAPPER:SIZE:SEED...

Each seed says who dies where; seed 0 is the undisturbed voyage. For each it prints the digests of the final state,
how many ranks were to die, how many were replaced, and `kept` if those that lived on kept pid and group object and
nobody kept the memory of an earlier generation.
"""

import copy
import faulthandler
import gc
import hashlib
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import namedtuple
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # what the wrappers import later: once for all ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from argosy.collective import Superseded, joining
from argosy.core import DeadlinePassed, PeerLost

STEPS = 5
PLACES = ["forward", "backward", "collective", "vote", "applied"]
LATER = ["reform", "joined", "healing"]
Death = namedtuple("Death", "rank life step place delay_s")


class Fates:
    """Who dies, in which life and step, where; no step: whenever it comes there."""

    def __init__(self, seed, size):
        chance = random.Random(seed)
        victims = [0] if seed % 5 == 1 else chance.sample(range(size), chance.choice([1, 1, 2]) if size > 2 else 1)
        step, delay_s = chance.randrange(STEPS - 1), partial(chance.uniform, 0.0001, 0.004)
        places = [PLACES[seed % len(PLACES)], chance.choice(PLACES)]  # a few seeds in a row see them all
        self.deaths = [Death(victim, 0, step, places[i], delay_s()) for i, victim in enumerate(victims) if seed]
        if seed and seed % 3 != 1:  # and while they re-form: the newcomer, or one that has lived so far
            left = [rank for rank in range(size) if rank not in victims]
            newcomer = size == 2 or chance.random() < 0.5
            rank, life = (victims[0], 1) if newcomer else (chance.choice(left), 0)
            self.deaths.append(Death(rank, life, None, LATER[(seed + seed // 3) % len(LATER)], delay_s()))

    def meet(self, rank, life, place, step=None):
        for death in self.deaths:
            if death[:2] == (rank, life) and death.place == place and death.step in (None, step):
                if place not in ("collective", "reform"):
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Timer(death.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def build(wrapper):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    if wrapper == "fsdp2":
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        fully_shard(model[0]), fully_shard(model[3])
        return fully_shard(model)
    return DDP(model, bucket_cap_mb=0.001)


Ship = namedtuple("Ship", "wrapper size store directory fates")


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

    def loss(self, step, in_backward=None):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step * 100 + self.rank))
        if in_backward is not None:  # the first layer's turn, when gradients of the last are on their way
            x.requires_grad_().register_hook(in_backward)
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
                self.meet("forward")
                loss = self.loss(self.step, lambda _: self.meet("backward"))
                self.meet("collective")
                loss.backward()
                if self.wrapper == "ddp":
                    self.keep(self.step + 1)  # what is local does not change by applying
                self.meet("vote")
                latch.vote(self.optimizer.step)
            if latch.committed:
                self.step += 1
                self.meet("applied", self.step - 1)
                if self.wrapper == "fsdp2":
                    self.keep(self.step)
            else:
                self.set_local(before)
                self.heal(newcomer=False)

    def meet(self, place, step=None):
        self.fates.meet(self.rank, self.life, place, self.step if step is None else step)

    def newer(self, generation):
        return int(self.store.get("generation")) > generation

    def heal(self, newcomer):
        while True:
            generation = int(self.store.get("generation"))
            if self.group.generation >= generation:
                time.sleep(0.002)
                continue
            try:
                self.meet("reform") if generation > 1 else None
                self.group.reform(None, generation, give_up=partial(self.newer, generation))
                self.meet("joined") if generation > 1 else None
                self.heal_replicated(newcomer) if self.wrapper == "ddp" else self.heal_sharded()
                return
            except (PeerLost, DeadlinePassed, Superseded):
                continue

    def heal_replicated(self, newcomer):
        """All take step and state of the lowest survivor; what is local comes from the own copy."""
        told = [None] * self.group.size()
        dist.all_gather_object(told, None if newcomer else self.step)
        self.meet("healing")
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
        self.meet("healing")
        dist.barrier()
        self.step = min(told)
        self.set_local(pickle.loads(Path(f"{self.kept}.{self.step}").read_bytes()))

    def digest(self):
        seen = hashlib.blake2s(digest_size=6)
        for p in [*self.model.parameters(), *self.model.buffers()]:
            seen.update((p.full_tensor() if self.wrapper == "fsdp2" else p).detach().numpy().tobytes())
        return seen.hexdigest()


def lets_go():
    """Whether this process soon maps no segment but that of its one group, without the help of a collection."""
    for _ in range(1000):  # a thread may be about to let go
        lines = Path("/proc/self/maps").read_text().splitlines()
        segments = 0 if os.environ.get("ARGOSY_COLLECTIVES") == "gloo" else 1
        if len({line.split()[4] for line in lines if "argosy-collective" in line}) == segments:
            return True
        time.sleep(0.005)
    return False


def rank_main(ship, rank, life):
    faulthandler.enable()
    store = open_client(ship.store)
    sailor = Sailor(ship, rank, life, store)
    world, told = dist.group.WORLD, [None] * ship.size
    sailor.heal(newcomer=life > 0)
    while True:
        sailor.sail()
        try:  # a rank may also die after its last step
            dist.all_gather_object(told, sailor.digest())
            dist.barrier()
            break
        except PeerLost:
            sailor.heal(newcomer=False)
    used = sailor.model.process_group if ship.wrapper == "ddp" else sailor.model[0].weight.device_mesh.get_group()
    same = world is dist.group.WORLD is used
    whole = same and lets_go()
    Path(ship.directory, f"end{rank}").write_text(f"{os.getpid()} {whole} {' '.join(sorted(set(told)))}")
    store.set(f"end{rank}", "")
    for other in range(ship.size):
        store.wait([f"end{other}"])


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
    return int(os.read(told[0], 10))


def open_client(where):
    port, name = where
    return dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False))


class Supervisor:
    """Forks the ranks, replaces those that are killed, and ends what hangs."""

    def __init__(self, ship):
        self.ship, self.store = ship, open_client(ship.store)
        self.pids, self.lives = {}, [0] * ship.size
        self.deadline = time.monotonic() + float(os.environ.get("VOYAGE_S", "200"))

    def start(self, rank):
        pid = os.fork()
        if pid:
            self.pids[pid] = rank
            return pid
        code = 1
        torch.set_num_threads(1)
        try:
            rank_main(self.ship, rank, self.lives[rank])
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    def run(self):
        self.store.set("generation", "1")
        first = [self.start(rank) for rank in range(self.ship.size)]
        while self.pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            rank = self.pids.pop(pid, None)
            if time.monotonic() > self.deadline:
                self.end(f"HANG {self.ship.fates.deaths}", signal.SIGABRT)
            elif rank is None:
                time.sleep(0.002)
            elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self.lives[rank] += 1
                self.store.add("generation", 1)
                self.start(rank)
            elif status:
                self.end(f"FAILED rank {rank} status {status} {self.ship.fates.deaths}", signal.SIGKILL)
        ends = [Path(self.ship.directory, f"end{rank}").read_text().split() for rank in range(self.ship.size)]
        lived_on = [rank for rank in range(self.ship.size) if not self.lives[rank]]
        kept = all(end[1] == "True" for end in ends) and all(int(ends[r][0]) == first[r] for r in lived_on)
        return ends[0][2:], sum(self.lives), kept

    def end(self, why, by):
        for left in self.pids:
            os.kill(left, by)
        print(why, flush=True)
        sys.exit(1)


def main():
    # Nothing is computed here: autograd's threads do not start in forks of a process that did.
    gc.freeze()  # a collection in a rank would copy the pages of all modules
    port = open_store()
    for voyage in sys.argv[1:]:
        wrapper, size, seed = voyage.split(":")
        began, fates = time.monotonic(), Fates(int(seed), int(size))
        with tempfile.TemporaryDirectory() as directory:
            where = port, f"{voyage}/{time.monotonic_ns()}"
            digest, replaced, kept = Supervisor(Ship(wrapper, int(size), where, directory, fates)).run()
        seconds = f"{time.monotonic() - began:.2f}s"
        print(voyage, *digest, len(fates.deaths), replaced, "kept" if kept else "changed", seconds, flush=True)


if __name__ == "__main__":
    main()
