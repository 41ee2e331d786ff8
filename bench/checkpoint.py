"""Saving, loading, snapshots and plans beside torch.distributed.checkpoint, torch.save, and raw disk and memory.

    python bench/checkpoint.py [--quick] [--only ROW,...] [--repeat N] [--json PATH]

The state is 2.15 GB of parameters and two Adam moments (0.27 GB with --quick), in a directory below the current one.
"""

import mmap
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from harness import Contender, Goal, Options, Row, run_benches
from scale import large_rows, layout_rows
from states import state_rows

from argosy.checkpoint import KeepLast, Saver, restore
from argosy.checkpoint.arena import Arena
from argosy.checkpoint.files import aligned, open_direct
from argosy.checkpoint.write_plan import shares
from argosy.transfer import Copy, Member, Split, Spot, State, Unit, copy_boxes, sharded, whole

BLOCK = 8 << 20


class Trained:
    """A model with Adam's moments of so many bytes, and its tensors as DCP takes them."""

    def __init__(self, total: int, seed: int | None, layers: int = 32) -> None:
        side = 1024
        rows = total // 3 // layers // 4 // side
        generator = torch.Generator().manual_seed(seed or 0)

        def tensor() -> torch.Tensor:
            return torch.zeros(rows, side) if seed is None else torch.randn(rows, side, generator=generator)

        self.model = torch.nn.Module()
        for i in range(layers):
            self.model.register_parameter(f"w{i}", torch.nn.Parameter(tensor()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            moments = {"exp_avg": tensor(), "exp_avg_sq": tensor()}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
            self.tensors[name] = parameter.detach()
            self.tensors |= {f"{name}.{key}": moment for key, moment in moments.items()}
        self.state = {"model": self.model, "optimizer": self.optimizer}


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def drop_cache(directory: Path) -> None:
    """Forget what the page cache holds of these files, so that a load is cold."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def sync_files(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


class Bench:
    """The state, a place on disk, and one Argosy saver whose arenas are warm."""

    def __init__(self, options: Options) -> None:
        self.bytes = (256 << 20) if options.quick else (2 << 30)
        self.directory = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir="."))
        self.trained, self.into = Trained(self.bytes, 0), Trained(self.bytes, None)
        self.savers: dict[str, Saver] = {}
        self.count = 0

    def fresh(self, name: str) -> Path:
        path = self.directory / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def saver(self, name: str) -> Saver:
        if name not in self.savers:
            self.savers[name] = Saver(self.directory / name, keep=[KeepLast(1)])
        return self.savers[name]

    def saved(self, name: str, state: object) -> float:
        """Seconds of a durable save; older steps are deleted before, as those of the others are."""
        self.count += 1
        deadline = time.monotonic() + 60
        while len(list((self.directory / name / "checkpoints").glob("step-*"))) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        return seconds(lambda: self.saver(name).save(state, self.count).wait())

    def save_argosy(self) -> float:
        # Something changes between two saves of a training; tensors that did not would not be written.
        for tensor in self.trained.tensors.values():
            tensor.view(-1)[0] += 1
        for state in self.trained.optimizer.state.values():
            state["step"] += 1
        return self.saved("argosy", self.trained.state)

    def save_dcp(self, threads: int) -> float:
        path = self.fresh(f"dcp{threads}")
        writer = dcp.FileSystemWriter(path, thread_count=threads)
        tensors = self.trained.tensors
        return seconds(lambda: (dcp.save(tensors, storage_writer=writer, no_dist=True), sync_files(path)))

    def save_torch(self) -> float:
        path = self.fresh("torch")
        return seconds(lambda: (torch.save(self.trained.tensors, path / "state.pt"), sync_files(path)))

    def raw(self, *, write: bool, huge: bool = True) -> float:
        """Four threads move the same bytes by O_DIRECT between a file and a few warm buffers."""
        path = self.directory / "raw"
        buffers = [aligned(BLOCK) for _ in range(4)]
        for buffer in buffers:
            if huge:
                buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer.write(os.urandom(BLOCK))
        if not write and not path.exists():
            self.raw(write=True)
        fd = open_direct(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if write else 0))

        def one(thread: int) -> None:
            move = os.pwritev if write else os.preadv
            for at in range(thread * BLOCK, self.bytes, 4 * BLOCK):
                move(fd, [buffers[thread]], at)

        def all_() -> None:
            if write:
                os.posix_fallocate(fd, 0, self.bytes)
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(one, range(4)))
            os.fdatasync(fd)

        taken = seconds(all_)
        os.close(fd)
        return taken

    def cold(self, name: str, save: Callable[[], float]) -> None:
        """See to it that there is something to load (rows can be asked for one by one), and none of it in memory."""
        if not (self.directory / name).exists():
            save()
        drop_cache(self.directory / name)

    def load_argosy(self) -> float:
        self.cold("argosy", self.save_argosy)
        return seconds(lambda: restore(self.directory / "argosy", into=self.into.state))

    def load_dcp(self) -> float:
        self.cold("dcp1", lambda: self.save_dcp(1))
        path = self.directory / "dcp1"
        return seconds(lambda: dcp.load(self.into.tensors, checkpoint_id=path, no_dist=True))

    def load_torch(self) -> float:
        self.cold("torch", self.save_torch)
        return seconds(lambda: torch.load(self.directory / "torch/state.pt"))

    def close(self) -> None:
        for saver in self.savers.values():
            saver.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def copying(size: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """memcpy, and the copy into an arena that sums the digest as it goes."""
    source = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    arena = Arena(size)
    target = np.frombuffer(arena.view, np.uint8)[:size]
    copy = Copy(whole((size,)), (size,), 1, Spot(source.ctypes.data, (1,)), Spot(arena.address, (1,)))
    return lambda: seconds(lambda: np.copyto(target, source)), lambda: seconds(lambda: copy_boxes([copy]))


class Stall:
    """A loop of matmuls and an AdamW step; what a save costs it."""

    def __init__(self, bench: Bench) -> None:
        torch.set_num_threads(1)
        rows = bench.bytes // 8 // 3 // 4 // 1024
        self.parameter = torch.nn.Parameter(torch.randn(rows, 1024))
        self.optimizer = torch.optim.AdamW([self.parameter], fused=True)
        self.parameter.grad = torch.zeros_like(self.parameter)
        self.matrix = torch.randn(1024, 1024)
        self.module = torch.nn.Module()
        self.module.register_parameter("w", self.parameter)
        self.saver = Saver(bench.fresh("stall"), keep=[KeepLast(1)])
        bench.savers["stall"] = self.saver
        self.count = 0
        self.step()

    def step(self) -> None:
        for _ in range(8):
            self.matrix @ self.matrix
        self.optimizer.step()

    def loop(self, *, saves: bool, steps: int = 30) -> float:
        """Seconds of so many steps, with one save among them, which may end behind them."""
        begun = time.perf_counter()
        for number in range(steps):
            if saves and number == 2:
                self.count += 1
                self.saver.save({"m": self.module, "o": self.optimizer}, self.count)
            self.step()
        taken = time.perf_counter() - begun
        self.saver.flush()
        return taken

    def dcp(self, path: Path, steps: int = 30) -> float:
        state = {"m": self.module.state_dict(), "o": dict(self.optimizer.state[self.parameter])}
        begun = time.perf_counter()
        for number in range(steps):
            if number == 2:
                shutil.rmtree(path, ignore_errors=True)
                dcp.save(state, checkpoint_id=path, no_dist=True)
            self.step()
        return time.perf_counter() - begun


def plan_save() -> float:
    sharded.cache_clear()

    def plan() -> None:
        units = {}
        for i in range(1024):
            layout = sharded((8192, 4096 + i % 8), (2048,), (Split(0),))
            units[f"{i}"] = Unit(f"{i}", {"parameter": Member("parameter", "parameter", "F32", layout)})
        shares(State(7, 2048, units))

    return seconds(plan)


def parameters(count: int, cells: int) -> torch.nn.Module:
    module = torch.nn.Module()
    for i in range(count):
        module.register_parameter(f"t{i}", torch.nn.Parameter(torch.zeros(cells)))
    return module


def disk_rows(bench: Bench) -> list[Row]:
    return [
        Row(
            key="save",
            title=f"durable save of {bench.bytes / 1e9:.2f} GB",
            base="DCP",
            contenders=[
                Contender(name="raw O_DIRECT", sample=lambda: bench.raw(write=True), warm_up=True),
                Contender(name="raw, small pages", sample=lambda: bench.raw(write=True, huge=False), warm_up=True),
                Contender(name="argosy", sample=bench.save_argosy, warm_up=True),
                Contender(name="DCP", sample=lambda: bench.save_dcp(1), warm_up=True),
                Contender(name="DCP 2 threads", sample=lambda: bench.save_dcp(2), warm_up=True),
                Contender(name="torch.save", sample=bench.save_torch, warm_up=True),
            ],
            goals=[
                Goal(of="argosy", times_of="raw O_DIRECT", times=0.85),
                Goal(of="argosy", times_of="DCP 2 threads", times=1.5),
            ],
        ),
        Row(
            key="load",
            title="load from files that are not cached (Argosy verifies digests)",
            base="DCP",
            contenders=[
                Contender(name="raw O_DIRECT", sample=lambda: bench.raw(write=False), warm_up=True),
                Contender(name="argosy", sample=bench.load_argosy, warm_up=True),
                Contender(name="DCP", sample=bench.load_dcp, warm_up=True),
                Contender(name="torch.load", sample=bench.load_torch, warm_up=True),
            ],
            goals=[Goal(of="argosy", times_of="DCP", times=2)],
        ),
    ]


def memory_rows(bench: Bench) -> list[Row]:
    memcpy, summed = copying(min(bench.bytes, 1 << 30))
    stall = Stall(bench)

    def lost(loop: Callable[[], float]) -> Callable[[], float]:
        return lambda: loop() - stall.loop(saves=False)

    return [
        Row(
            key="copy",
            title="copy heap memory into an arena",
            base="memcpy",
            contenders=[
                Contender(name="memcpy", sample=memcpy, warm_up=True),
                Contender(name="with digest", sample=summed, warm_up=True),
            ],
            goals=[Goal(of="with digest", times_of="memcpy", times=0.8)],
        ),
        Row(
            key="lost",
            title="training time lost to one save, one process",
            base="DCP save",
            contenders=[
                Contender(name="argosy", sample=lost(lambda: stall.loop(saves=True)), warm_up=True),
                Contender(name="DCP save", sample=lost(lambda: stall.dcp(bench.directory / "lost")), warm_up=True),
            ],
            goals=[Goal(of="argosy", times_of="DCP save", times=3)],
        ),
    ]


def count_rows(bench: Bench, options: Options) -> list[Row]:
    cells, count = 100 * 1024 // 4, 1000 if options.quick else 10_000
    models = {"many": parameters(count, cells), "one": parameters(1, count * cells)}

    def save(name: str) -> float:
        with torch.no_grad():
            for parameter in models[name].parameters():
                parameter += 1
        return bench.saved(name, models[name])

    def load(name: str) -> float:
        bench.cold(name, lambda: save(name))
        return seconds(lambda: restore(bench.directory / name, into=models[name], fresh=True))

    def row(key: str, title: str, sample: Callable[[str], float]) -> Row:
        return Row(
            key=key,
            title=f"{title} {count:,} tensors of 100 KiB and one of the same size",
            base="one tensor",
            contenders=[
                Contender(name="many tensors", sample=lambda: sample("many"), warm_up=True),
                Contender(name="one tensor", sample=lambda: sample("one"), warm_up=True),
            ],
            goals=[Goal(of="many tensors", times_of="one tensor", times=1 / 1.3)],
        )

    return [
        row("small", "save", save),
        row("small-load", "load", load),
        Row(
            key="plan",
            title="plan a save of 1,024 tensors on 2,048 ranks",
            base="save",
            contenders=[Contender(name="save", sample=plan_save)],
            goals=[Goal(of="save", at_most=1.0)],
        ),
    ]


def rows(options: Options) -> list[Row]:
    bench = Bench(options)
    BENCHES.append(bench)
    own = [*memory_rows(bench), *disk_rows(bench), *count_rows(bench, options)]
    return [*own, *(row for more in (state_rows, large_rows, layout_rows) for row in more(bench.directory, options))]


BENCHES: list[Bench] = []

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    try:
        sys.exit(run_benches("Checkpoints, snapshots and plans.", rows))
    finally:
        for each in BENCHES:
            each.close()
