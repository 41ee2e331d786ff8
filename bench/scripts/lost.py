"""Two ranks train; what one save costs them, by each way to save: prints one JSON line. Started by bench/states.py.

lost.py WAY DIRECTORY MEGABYTES        with RANK, WORLD_SIZE and RENDEZVOUS in the environment
"""

import atexit
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from argosy.checkpoint import Keeping, KeepLast, Saver
from argosy.checkpoint.keeper.life import Life

warnings.simplefilter("ignore")
way, directory, size = sys.argv[1], sys.argv[2], int(sys.argv[3]) << 20
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=dist.FileStore(os.environ["RENDEZVOUS"], ranks), rank=rank, world_size=ranks)
torch.set_num_threads(1)
module = nn.Module()
module.register_parameter(f"w{rank}", nn.Parameter(torch.randn(size // ranks // 12 // 1024, 1024)))
parameter = next(module.parameters())
parameter.grad = torch.zeros_like(parameter)
optimizer = torch.optim.AdamW([parameter], fused=True)
matrix = torch.randn(512, 512)
spare = [torch.zeros_like(parameter) for _ in range(3)]
longest = held = 0.0
fence_at = 0.0


def memcpy() -> None:
    """The state, copied by this thread into memory that was touched before."""
    for into, tensor in zip(spare, [parameter.detach(), *moments()], strict=True):
        into.copy_(tensor)


def moments() -> list[torch.Tensor]:
    return [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]


def timed(work) -> float:
    dist.barrier()
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def matmuls_of(copies: float) -> int:
    """How many matmuls take as long as so many memcpys, on the slower rank."""
    wanted = copies * min(timed(memcpy) for _ in range(3)) / min(timed(lambda: matrix @ matrix) for _ in range(5))
    answer = torch.tensor(wanted)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return int(answer) + 1


def step() -> None:
    global longest
    begun = time.perf_counter()
    for _ in range(matmuls):
        matrix @ matrix
    optimizer.step()
    dist.barrier()
    longest = max(longest, time.perf_counter() - begun)


def state() -> dict[str, object]:
    own = {key: value for key, value in optimizer.state[parameter].items() if key != "step"}
    return {f"w{rank}": parameter.detach(), **{f"{key}{rank}": value for key, value in own.items()}}


def make_way():
    """What begins a save, and what waits for its end."""
    if way.startswith("argosy"):
        # Each rank's tensors are its own: local, not replicas of each other.
        from argosy.transfer import Member, describe, replicated

        home = Path(f"{directory}.record")
        home.mkdir(exist_ok=True)
        (home / "run.json").write_text('{"launch": 1, "state": "running"}')
        atexit.register((home / "run.json").write_text, '{"launch": 1, "state": "ended"}')
        keeping = Keeping(life=Life("bench", str(home), 1, "")) if way == "argosy, keeper" else None
        saver = Saver(directory, keep=[KeepLast(1)], keeping=keeping)

        def begin(number: int) -> object:
            described = describe(module, optimizer)
            for unit in described.units.values():
                for key, member in unit.members.items():
                    alone = replicated(member.shape, (rank,))
                    unit.members[key] = Member(key, member.role, member.dtype, alone, member.local, member.kind)
            return saver.save(described, number)

        return begin, lambda handle: handle.copied.result(600) if way == "argosy, memory" else handle.wait(600)
    if way == "memcpy":
        return lambda _: memcpy(), lambda _: None
    if way == "DCP save":
        return lambda number: dcp.save(state(), checkpoint_id=f"{directory}/{number}"), lambda _: None
    options = {}
    if "cached" in way:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = {"async_stager": DefaultStager(StagingOptions(False, False, False, False))}
    kind = AsyncCheckpointerType.PROCESS if "process" in way else AsyncCheckpointerType.THREAD

    def finish(response: object) -> None:
        getattr(response, "upload_completion", response).result()

    return lambda number: dcp.async_save(
        state(), checkpoint_id=f"{directory}/{number}", async_checkpointer_type=kind, **options
    ), finish


def at_fence(*_: object) -> None:
    """The first of the hooks before a step: the saver's come behind it."""
    global fence_at
    fence_at = time.perf_counter()


def behind_fence(*_: object) -> None:
    """The last of them: what lies between is what the step waited for."""
    global held
    held += time.perf_counter() - fence_at


def loop(begin: object, number: int | None) -> tuple[float, object]:
    global held
    handle = last = None
    held = 0.0
    started = time.perf_counter()
    for i in range(12):
        if number is not None and i == 2:
            begun = time.perf_counter()
            handle = begin(number)
            held = time.perf_counter() - begun
            last = optimizer.register_step_pre_hook(behind_fence)
        step()
    taken = time.perf_counter() - started
    if last is not None:
        last.remove()
    return taken, handle


optimizer.step()
optimizer.register_step_pre_hook(at_fence)
matmuls = matmuls_of(2.5)
step()
begin, end = make_way()
results = []
warm = 3 if way == "argosy, keeper" else 1  # So many touch memory for the first time: a keeper has three arenas.
for number in range(warm + 3):
    longest = 0.0
    plain, _ = loop(begin, None)
    usual, longest = longest, 0.0
    with_save, handle = loop(begin, number)
    end(handle)
    dist.barrier()
    if number >= warm:
        results.append({"lost": with_save - plain, "stall": held, "longest": longest - usual})
if rank == 0:
    print(json.dumps(results), flush=True)
os._exit(0)
