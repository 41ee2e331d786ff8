"""A compiled step trains real ranks as FSDP2 does, and runs eagerly, with the reason, where it cannot be compiled."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from console import Console
from graph.models import Tiny, batch, loss
from torch import nn
from torch.fx import GraphModule

from argosy.core import ConfigError
from argosy.cost import Recipe, load_chip
from argosy.graph import PASSES, Training, capture, compile
from argosy.graph.agreement import Agreement, agree, decide
from argosy.graph.certificate import graph_text, random_inputs
from argosy.graph.certificate_cache import apply_passes_once
from argosy.graph.file_lock import locked
from argosy.graph.inductor import check_region
from argosy.graph.regions import find_regions, region_key, with_compiled
from argosy.graph.track_record import PROFILED, TIMED

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
passes = {{"bucket": PASSES["bucket"]}}
step = compile(first, loss, rows[0], recipe="fsdp=2 micro=2", passes=passes, inductor={inductor})
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
    print(json.dumps([worst, step.reason, kept, float(odd), step.regions, step.notes]))
dist.destroy_process_group()
"""


@pytest.mark.system
@pytest.mark.parametrize("inductor", [False, True])
def test_two_ranks_train_as_under_fsdp2(tmp_path: Path, inductor: bool):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(HERE.parent), store=f"file://{tmp_path}/store", inductor=inductor))
    worst, reason, kept, odd, regions, notes = run_two(script)
    assert reason == ""
    assert worst < 1e-5
    assert "bucket" in kept
    assert odd > 0
    assert (regions > 0) == inductor, notes
    assert notes == []


TENSOR_PARALLEL = """
import copy, json, sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from graph.models import Tiny, batch, loss
from argosy.graph import compile

dist.init_process_group("gloo", init_method={store!r}, rank=int(sys.argv[1]), world_size=2)
torch.manual_seed(0)
first = Tiny(layers=2)
whole = copy.deepcopy(first)
rows = batch(2)
step = compile(first, loss, rows, recipe="tp=2 micro=2", inductor=False)
found = [float(step(*rows)), float(step(*rows, scale=0.5))]
expected = loss(whole, *rows)
(expected * 1.5).backward()
worst = max(abs(each - float(expected)) for each in found)
grads = dict(whole.named_parameters())
for name, each in first.named_parameters():
    grad = each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad
    worst = max(worst, float((grad - grads[name].grad).abs().max()))
odd = batch(1)
eager = abs(float(step(*odd)) - float(loss(whole, *odd)))
sums = [c.collectives for c in step.certificates if c.name == "merge_sums"]
if dist.get_rank() == 0:
    print(json.dumps([worst, step.reason, eager, sums]))
dist.destroy_process_group()
"""

RUN = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch, argosy
from graph.models import Tiny, batch, loss

run = argosy.Run({directory!r}, seed=0)
torch.manual_seed(0)
model = Tiny(layers=1)
rows = [batch(2) for _ in range(2)]
compiled = argosy.compile(model, loss, rows[0], recipe="fsdp=2 micro=2", inductor=False)
assert not compiled.reason, compiled.reason
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.track(model=model, optimizer=optimizer)
for step in run.steps(until=30):
    with step:
        for x, y in rows:
            value = compiled(x, y, scale=0.5)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=value)
        if step.number == 12 and not Path({killed!r}).exists() and run.rank == 1:
            Path({killed!r}).write_text("once")
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
if run.rank == 0:
    print("last", float(value))
"""


def run_two(script: Path) -> list[object]:
    """Run a script as two ranks; return what rank 0 printed last."""
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    try:
        done = [each.communicate(timeout=500) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0], done[0][1][-3000:]
    return json.loads(done[0][0].splitlines()[-1])


@pytest.mark.system
def test_tensor_parallel_ranks_compute_what_one_computes(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(TENSOR_PARALLEL.format(tests=str(HERE.parent), store=f"file://{tmp_path}/store"))
    worst, reason, eager, sums = run_two(script)
    assert reason == ""
    assert isinstance(worst, float)
    assert isinstance(eager, float)
    assert worst < 1e-5
    assert eager < 1e-5
    assert isinstance(sums, list)
    assert sums[0][1] < sums[0][0]


def finished(console: Console, directory: Path, killed: Path) -> tuple[str, str]:
    """What the run printed last, and all it printed."""
    script = directory / "train.py"
    script.write_text(RUN.format(tests=str(HERE.parent), directory=str(directory / "out"), killed=str(killed)))
    ended = console.argosy("run", "-n", "2", str(script), patience_s=500)
    assert ended.code == 0, ended.text
    return next(line for line in ended.text.splitlines() if "last" in line).split("last")[1], ended.text


@pytest.mark.system
def test_a_compiled_step_survives_a_kill_under_run(console: Console, tmp_path: Path):
    """Accumulation, clipping and a killed rank: the run ends as the one that nobody killed."""
    ends: list[str] = []
    for name in ("calm", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        mark = folder / "mark"
        if name == "calm":
            mark.write_text("no kill")
        ends.append(finished(console, folder, mark)[0])
        assert mark.exists()
    assert ends[0] == ends[1]
    compared = json.loads(console.argosy("compare", "last", "--json").out)
    assert compared["forecasts"][0]["recipe"] == "fsdp=2 micro=2"
    assert compared["forecasts"][0]["step"][1] > 0
    assert "80% interval of its prediction" in console.argosy("compare", "last").text


def test_a_model_elsewhere_is_not_captured():
    with torch.device("meta"):
        model = Tiny(layers=1)
    assert "on meta" in compile(model, loss, batch(1)).reason


def test_ranks_that_differ_run_eagerly():
    assert decide([("a", ["x", "y"], ""), ("a", ["y"], "")]) == Agreement("", "a", ["y"])
    assert "rank 1: no" in decide([("a", [], ""), ("", [], "no")]).reason
    assert "different collectives" in decide([("a", [], ""), ("b", [], "")]).reason


def test_a_replaced_rank_takes_the_decision_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARGOSY_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("ARGOSY_RUN", "it-1")
    monkeypatch.setenv("ARGOSY_GENERATION", "1")
    for number in range(100):
        (tmp_path / f"compiled-it-1-{number}.json").write_text('{"reason": "", "order": "a", "regions": ["x"]}')
    assert agree("a", ["x", "y"], "") == Agreement("", "a", ["x"])
    for order, regions, failure in (("b", ["x"], ""), ("a", [], ""), ("", [], "not captured")):
        with pytest.raises(ConfigError, match="replaced rank"):
            agree(order, regions, failure)


def test_one_rank_is_equal_to_eager_and_accumulates():
    model = Tiny()
    rows = batch(2)
    step = compile(model, loss, rows, inductor=False)
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


@pytest.mark.parametrize("text", ["pp=2", "fsdp=2", "accumulate=2"])
def test_recipes_that_cannot_run_here_are_refused(text: str):
    with pytest.raises(ConfigError):
        compile(Tiny(), loss, batch(1), recipe=text)


def test_equal_layers_are_one_region():
    """A model of three equal layers has the distinct regions of one with two, as its first and last may differ."""
    found: list[tuple[int, int]] = []
    for layers in (3, 5):
        step = capture(Training(lambda n=layers: Tiny(layers=n), batch, loss), Recipe(micro=2))
        regions = find_regions(step.graph)
        assert sum(len(each.nodes) for each in regions) > 0.8 * sum(n.op == "call_function" for n in step.graph.nodes)
        found.append((len(regions), len({region_key(each, each.module()) for each in regions})))
    assert found[1][0] > found[0][0]
    assert found[1][1] == found[0][1]


def as_function(module: GraphModule) -> Callable[..., object]:
    def run(*inputs: torch.Tensor) -> object:
        return module(*inputs)

    return run


def test_regions_compute_what_the_graph_computes():
    """Cutting a graph into regions and calling them changes nothing."""
    step = capture(Training(lambda: Tiny(layers=2), batch, loss), Recipe(micro=2))
    regions = find_regions(step.graph)
    cut = GraphModule(step.module, with_compiled(step.graph, regions, [as_function(each.module()) for each in regions]))
    parameters, buffers, batches = random_inputs(step, 0)
    inputs = [each.float() for each in (*parameters.values(), *buffers.values())] + batches[0]
    with torch.no_grad():
        for a, b in zip(step.module(*inputs), cut(*inputs), strict=True):
            assert torch.equal(a, b)


def test_a_compiler_that_errs_is_caught():
    step = capture(Training(lambda: Tiny(layers=1), batch, loss), Recipe(micro=2))
    module = max(find_regions(step.graph), key=lambda each: len(each.nodes)).module()
    assert check_region(module, module) == 0
    with pytest.raises(ValueError, match="errs by"):
        check_region(module, lambda *x: tuple(each * 1.001 for each in module(*x)))
    with pytest.raises(ValueError, match="shape, stride or dtype"):
        check_region(module, lambda *x: tuple(each.double() for each in module(*x)))


def test_a_failed_compiler_leaves_the_graph_and_says_why(monkeypatch: pytest.MonkeyPatch):
    def broken(_module: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("argosy.graph.inductor.compile_module", broken)
    model, rows = Tiny(layers=1), batch(2)
    step = compile(model, loss, rows, passes={})
    assert step.reason == ""
    assert step.regions == 0
    assert "no C++ compiler" in step.notes[0]
    assert torch.allclose(step(*rows), loss(model, *rows).detach(), rtol=1e-6)


def test_certificates_come_from_disk_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step = capture(Training(lambda: Tiny(layers=1), batch, loss), Recipe(fsdp=2))
    passes, chip = {"canonicalise": PASSES["canonicalise"], "bucket": PASSES["bucket"]}, load_chip("cpu")
    first, proven, stored = apply_passes_once(step, passes, chip)
    second, found, again = apply_passes_once(step, passes, chip)
    assert (stored, again) == (False, True)
    assert found == proven
    assert graph_text(second.graph) == graph_text(first.graph)
    assert not apply_passes_once(step, {"canonicalise": PASSES["canonicalise"]}, chip)[2]
    for each in tmp_path.rglob("*.json"):
        each.write_text('{"after": "x", "certificates": []}')
    assert not apply_passes_once(step, passes, chip)[2]


def test_a_lock_is_waited_for_and_given_up(tmp_path: Path):
    with locked(tmp_path / "a" / "lock"), locked(tmp_path / "a" / "lock", patience_s=0.2):
        pass  # The holder never lets go: the second goes ahead without it.


def test_the_prediction_is_recorded_beside_what_happened(monkeypatch: pytest.MonkeyPatch):
    written: list[dict[str, object]] = []
    monkeypatch.setattr("argosy.graph.track_record.rank_journal.write", lambda kind, **all: written.append(all))
    rows = batch(2)
    step = compile(Tiny(layers=1), loss, rows, passes={}, inductor=False)
    for _ in range(PROFILED + TIMED + 3):
        step(*rows)
    assert len(written) == 1
    assert step.record is None
    predicted, measured = written[0]["predicted"], written[0]["measured"]
    assert isinstance(predicted, dict)
    assert isinstance(measured, dict)
    assert predicted["low_s"] < predicted["step_s"] < predicted["high_s"]
    assert measured["step_s"] > 0
    assert {"matmul", "memory", "attention"} <= predicted["classes"].keys() & measured["classes"].keys()
    assert predicted["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.1)
