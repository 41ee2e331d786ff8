"""A compiled step trains real ranks as FSDP2 does, and runs eagerly, with the reason, where it cannot be compiled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graph.models import Tiny, batch, loss
from torch import nn

from argosy.core import ConfigError
from argosy.graph import compile

HERE = Path(__file__).resolve().parent

SCRIPT = """
import copy, json, os, sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from graph.models import Tiny, batch, loss
from argosy.graph import PASSES, compile
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", init_method={store!r}, rank=int(sys.argv[1]), world_size=2)
torch.manual_seed(0)
first = Tiny(tied=True, layers=1)
second = copy.deepcopy(first)
for block in second.blocks:
    fully_shard(block)
fully_shard(second)
torch.manual_seed(dist.get_rank())
rows = [batch(2) for _ in range(3)]
step = compile(first, loss, rows[0], recipe="fsdp=2 micro=2", passes={{"bucket": PASSES["bucket"]}})
optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (first, second)]
worst = 0.0
for each in rows:
    ours = step(*each)
    theirs = loss(second, *each)
    theirs.backward()
    worst = max(worst, abs(float(ours) - float(theirs)))
    norms = [float(torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0).full_tensor()) for m in (first, second)]
    worst = max(worst, abs(norms[0] - norms[1]))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
odd = step(*batch(1))
kept = [c.name for c in step.certificates if c.kept]
if dist.get_rank() == 0:
    print(json.dumps([worst, step.reason, kept, float(odd)]))
dist.destroy_process_group()
"""


@pytest.mark.soak
def test_two_ranks_train_as_under_fsdp2(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(HERE.parent), store=f"file://{tmp_path}/store"))
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    done = [each.communicate(timeout=300) for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], done[0][1][-3000:]
    worst, reason, kept, odd = json.loads(done[0][0].splitlines()[-1])
    assert reason == ""
    assert worst < 1e-5
    assert "bucket" in kept
    assert odd > 0


def test_one_rank_is_equal_to_eager_and_accumulates():
    model = Tiny()
    rows = batch(2)
    step = compile(model, loss, rows)
    assert step.reason == ""
    found = [step(*rows), step(*rows)]
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for expected in found:
        eager = loss(model, *rows)
        assert torch.allclose(expected, eager.detach(), rtol=1e-6)
        eager.backward()
    assert all(torch.allclose(grads[name], p.grad, rtol=1e-6, atol=1e-7) for name, p in model.named_parameters())


def test_what_cannot_be_captured_runs_eagerly_and_says_why():
    def branch(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = loss(model, x, y)
        return total * 2 if total > 0 else total

    model = Tiny()
    rows = batch(2)
    step = compile(model, branch, rows)
    assert "depends on the values" in step.reason
    assert "test_compiled.py:" in step.reason
    assert torch.equal(step(*rows), branch(model, *rows).detach())
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("text", ["tp=2", "pp=2", "fsdp=2", "accumulate=2"])
def test_recipes_that_cannot_run_here_are_refused(text: str):
    with pytest.raises(ConfigError):
        compile(Tiny(), loss, batch(1), recipe=text)
