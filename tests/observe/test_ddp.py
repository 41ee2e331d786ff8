"""Real ranks on Gloo over loopback: what their progress pages say."""

from pathlib import Path

from ranks import Ranks

from argosy.observe import Flag, absentees

TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
form()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""

SKIP = """
form()
x = torch.ones(2)
for step in range(12):
    if rank == 3 and step == 11:
        time.sleep(600)
    dist.all_reduce(x)  # here
"""


def test_twenty_ddp_steps_of_four_ranks_count_alike(tmp_path: Path):
    with Ranks(tmp_path, 4, TRAIN) as ranks:
        outputs = ranks.outputs()
        pages = ranks.pages()
    assert outputs == [""] * 4
    assert [page.steps for page in pages.values()] == [20] * 4
    groups = [page.groups for page in pages.values()]
    assert [len(group) for group in groups] == [1] * 4
    counts = {group[0].issued for group in groups}
    assert len(counts) == 1
    assert counts.pop() >= 20
    assert {(g[0].op, g[0].size, g[0].waiting) for g in groups} == {("barrier", 4, False)}
    assert all(page.has(Flag.PROCESS_GROUP) and page.has(Flag.TORCH_HOOKS) for page in pages.values())
    assert all(page.pulse >= 80 for page in pages.values())  # forward and backward, begin and end


def test_a_rank_that_skips_an_all_reduce_is_named(tmp_path: Path):
    line = next(i for i, text in enumerate(script_text(SKIP), 1) if text.endswith("# here"))
    with Ranks(tmp_path, 4, SKIP) as ranks:
        pages = ranks.until(
            lambda pages: (
                sum(bool(p.groups) and p.groups[0].waiting for p in pages.values()) == 3
                and all(p.groups[0].issued == 12 - (r == 3) for r, p in pages.items())
            )
        )
    (absence,) = absentees(pages)
    assert (absence.op, absence.number, absence.site) == ("all_reduce", 12, f"script.py:{line}")
    assert absence.line({3: "data.py:41"}) == "ranks 0-2 wait in all_reduce #12; rank 3 at data.py:41"


def script_text(body: str) -> list[str]:
    from ranks import PRELUDE

    return (PRELUDE + body).splitlines()
