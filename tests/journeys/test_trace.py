"""`argosy trace` profiles ranks that are training, without touching the script."""

import json
from pathlib import Path

import pytest
from console import Console, until

pytestmark = pytest.mark.system
SCRIPT = """
import time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = torch.ones(1000)
while True:
    model(torch.randn(8, 64)).square().mean().backward()
    dist.all_reduce(total)
    optimizer.step()
    time.sleep(0.01)
"""


def test_ranks_that_train_are_profiled_into_one_file(console: Console, tmp_path: Path) -> None:
    (console.cwd / "train.py").write_text(SCRIPT)
    console.start("run", "-n", "2", "--name", "traced", "train.py", out=tmp_path / "out")
    until(lambda: any(rank["steps"] > 20 for rank in console.ps("traced").get("ranks", [])), "steps")
    asked = console.argosy("trace", "traced", "--steps", "3", "--json")
    assert asked.code == 0, asked.text
    found = json.loads(asked.out)
    assert found["ranks"] == [0, 1]
    events = json.loads(Path(found["path"]).read_text())["traceEvents"]
    steps = {(event["pid"] >> 10, event["name"]) for event in events if event["name"].startswith("ProfilerStep#")}
    assert {rank for rank, _ in steps} == {0, 1}
    assert len(steps) == 6
    assert console.argosy("report", found["path"]).code == 0
    again = console.argosy("trace", "traced", "--steps", "1", "--rank", "1", "-o", "one.json")
    assert again.code == 0, again.text
    assert (console.cwd / "one.json").exists()
    assert any(rank["steps"] > 20 for rank in console.ps("traced")["ranks"])
