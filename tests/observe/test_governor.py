"""The governor bounds the cost of recording by recording fewer steps in full."""

from pathlib import Path

from ranks import run_script

from argosy.observe.governor import STEPS, Governor

MS = 1_000_000


def drive(governor: Governor, rounds: int, step_ns: int, cost_ns: int, first: int = 1) -> int:
    """Let steps pass; returns the number of the next one. A step that is not full costs a tenth."""
    now = governor._since
    for step in range(first, first + rounds * STEPS):
        now += step_ns
        governor.see(step, now)
        governor.add(cost_ns if governor.full else cost_ns // 10)
    return first + rounds * STEPS


def test_cheap_recording_stays_full():
    governor = Governor()
    drive(governor, 10, 50 * MS, 100_000)
    assert governor.every == 1
    assert governor.full


def test_dear_recording_is_thinned_until_it_costs_less_than_one_percent_and_comes_back():
    governor = Governor()
    after = drive(governor, 20, 10 * MS, 200_000)  # 2% if full.
    assert governor.every == 4  # With 2, it would cost 1.1%: half of the steps 2%, the others 0.2%.
    drive(governor, 20, 100 * MS, 200_000, after)
    assert governor.every == 1


def test_a_rank_that_only_communicates_counts_all_and_records_a_part(tmp_path: Path):
    printed = run_script(
        """
import sys
import torch, torch.distributed as dist
from argosy.observe import DETAIL, Page, Ring, install, mark_step, record_spans
from argosy.observe.ring_reader import RingReader
page = Page.create(sys.argv[1] + "/page")
record_spans(Ring.create(sys.argv[1] + "/ring"))
install(page)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2)
for step in range(1, 401):
    for _ in range(10):
        dist.all_reduce(x)
    mark_step(step)
reader = RingReader(sys.argv[1] + "/ring")
columns, names = reader.take(), reader.names()
chosen = columns["name"] == names.index("all_reduce")
print(page.read().groups[0].issued, int(chosen.sum()) < 4000, DETAIL in names)
""",
        str(tmp_path),
    )
    assert printed == "4000 True True\n"
