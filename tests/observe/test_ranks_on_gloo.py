"""Real ranks on Gloo over loopback: what their progress pages say."""

import time
from pathlib import Path

import msgspec
from ranks import Ranks

from argosy.control.hang_suspect import HangPolicy, Suspect, decide_hang
from argosy.observe import Activity, Flag, RankProgress
from argosy.supervise.evidence.hang_samples import Tracker

TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
form()
torch.manual_seed(0)
layers = [torch.nn.Linear(8, 64), *(torch.nn.Linear(64, 64) for _ in range(6)), torch.nn.Linear(64, 1)]
model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)  # many buckets
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
dist.barrier()
"""

SKIP = """
form()
x = torch.ones(2)
pair = dist.new_group([0, 2])
for step in range(12):
    if rank == 3 and step == 11:
        time.sleep(600)
    dist.all_reduce(x)  # line 8
"""

LATE = """
from torch.nn.parallel import DistributedDataParallel as DDP
form()
model = DDP(torch.nn.Linear(8, 1))
for step in range(3):
    loss = model(torch.randn(4, 8)).sum()
    if rank == 1 and step == 2:
        time.sleep(600)
    loss.backward()  # line 9
"""

PAIR = """
import torch.distributed._functional_collectives as functional
form()
x = torch.full((2,), float(rank))
for _ in range(3):
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
work = dist.irecv(x, 1) if rank == 0 else dist.isend(x, 0)
work.wait()
half = dist.new_group([1])
with torch.inference_mode():
    dist.all_reduce(torch.ones(2))
    dist.barrier()
dist.all_gather([torch.ones(2), torch.ones(2)], x)
dist.all_gather_single(torch.ones(4), x)
dist.broadcast(x, 0)
dist.all_gather_object([None, None], {"rank": rank})  # two all_gathers
functional.all_reduce(x, "sum", dist.group.WORLD).sum().item()
if rank == 0:
    dist.all_reduce(x)
else:
    dist.broadcast(x, 0)
"""


def suspect(pages: dict[int, RankProgress]) -> Suspect:
    """What is made of these pages if they stay as they are."""
    tracker = Tracker()
    for rank, page in pages.items():
        tracker.update(rank, page, None, 0.0)
    views = [msgspec.structs.replace(view, starting=False) for view in tracker.views()]
    decision = decide_hang(views, HangPolicy(), 1e6)
    assert isinstance(decision, Suspect)
    return decision


def test_ddp_steps_of_four_ranks_count_alike(tmp_path: Path):
    with Ranks(tmp_path, 4, TRAIN) as ranks:
        assert ranks.outputs() == [""] * 4
        pages = ranks.pages().values()
    assert [page.steps for page in pages] == [20] * 4
    assert [len(page.groups) for page in pages] == [1] * 4
    (count,) = {page.groups[0].issued for page in pages}
    assert count >= 60
    assert {(p.groups[0].op, p.groups[0].size, p.groups[0].waiting) for p in pages} == {("barrier", 4, False)}
    assert all(page.has(Flag.PROCESS_GROUP) and page.has(Flag.TORCH_HOOKS) for page in pages)
    assert all(page.pulse >= 80 for page in pages)  # forward and backward, begin and end


def test_a_rank_that_skips_an_all_reduce_is_named(tmp_path: Path):
    def stuck(pages: dict[int, RankProgress]) -> bool:
        default = [page.groups[0] for page in pages.values() if page.groups]
        return [(group.issued, group.waiting) for group in default] == [(12, True)] * 3 + [(11, False)]

    with Ranks(tmp_path, 4, SKIP) as ranks:
        pages = ranks.until(stuck)
    hang = suspect(pages)
    (wait,) = hang.waits
    assert (str(wait), wait.site, wait.ranks, wait.absent) == ("all_reduce #12", "script.py:8", (0, 1, 2), (3,))
    assert [culprit.index for culprit in hang.culprits] == [3]
    assert [list(group.members() or []) for group in pages[2].groups] == [[0, 1, 2, 3], [0, 2]]


def test_a_rank_missed_by_ddps_reducer_is_named(tmp_path: Path):
    """The others wait inside C++, which no hook sees; their counts tell."""

    def stuck(pages: dict[int, RankProgress]) -> bool:
        counts = [page.groups[0].issued for page in pages.values() if page.groups]
        doing = [page.doing for page in pages.values()]
        return doing == [Activity.BACKWARD, Activity.NOTHING, Activity.BACKWARD] and counts[0] == counts[2] > counts[1]

    with Ranks(tmp_path, 3, LATE) as ranks:
        ranks.until(stuck)
        time.sleep(0.5)
        pages = ranks.until(stuck)
    assert {(pages[rank].groups[0].op, pages[rank].groups[0].site) for rank in (0, 2)} == {
        ("all_reduce", "script.py:9")
    }


def test_every_operation_is_counted_once(tmp_path: Path):
    """Point-to-point apart; in inference mode too; a mismatch of operations is found when both wait."""
    with Ranks(tmp_path, 2, PAIR) as ranks:
        pages = ranks.until(
            lambda pages: (
                [(p.groups[0].op, p.groups[0].waiting) for p in pages.values() if p.groups]
                == [("all_reduce", True), ("broadcast", True)]
            )
        )
    assert [page.groups[0].p2p for page in pages.values()] == [4, 4]
    assert [page.groups[0].issued for page in pages.values()] == [9, 9]
    waits = {(str(wait), wait.site, wait.ranks, wait.absent) for wait in suspect(pages).waits}
    assert waits == {("all_reduce #9", "script.py:19", (0,), ()), ("broadcast #9", "script.py:21", (1,), ())}
