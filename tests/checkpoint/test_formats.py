"""Others' formats there and back, and `argosy ckpt`."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

from argosy.checkpoint import KeepEvery, KeepLast, Saver, diff, export, import_, opened, restore, tensors, verify
from argosy.checkpoint.format import step_of
from argosy.checkpoint.hf import read_safetensors
from argosy.cli.ckpt import command
from argosy.core import ConfigError


def saved(tmp_path: Path, steps: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    with Saver(tmp_path, keep=[KeepLast(9)]) as saver:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            saver.save({"model": model, "optimizer": optimizer}, step).wait(300)
    return model


def ckpt(*args: object) -> str:
    result = CliRunner().invoke(command, [str(each) for each in args], catch_exceptions=False)
    assert result.exit_code in (0, 1), result.output
    return result.stdout


@pytest.mark.parametrize("kind", ["hf", "dcp", "torch"])
def test_there_and_back(tmp_path: Path, kind: str):
    model = saved(tmp_path / "run")
    export(tmp_path / "run", kind, tmp_path / "out")
    assert import_(kind, tmp_path / "out", tmp_path / "again", step=7) > 0
    found = restore(tmp_path / "again")
    assert found.step == 7
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ConfigError, match="it exists"):
        export(tmp_path / "run", kind, tmp_path / "out")


def test_the_safetensors_library_reads_what_is_exported(tmp_path: Path):
    import safetensors.torch as library

    model = saved(tmp_path / "run")
    export(tmp_path / "run", "hf", tmp_path / "out")
    found = library.load_file(tmp_path / "out/model.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }
    library.save_file({"x": torch.arange(3)}, tmp_path / "theirs.safetensors")
    assert read_safetensors(tmp_path / "theirs.safetensors")["x"].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_itself_reads_what_is_exported(tmp_path: Path):
    import torch.distributed.checkpoint as dcp

    model = saved(tmp_path / "run")
    export(tmp_path / "run", "dcp", tmp_path / "out")
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(into["model"][name], tensor) for name, tensor in model.state_dict().items())


def test_dcp_metadata_that_would_run_code_is_refused(tmp_path: Path):
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (print, ("run",))

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ConfigError, match="not a description of tensors"):
        import_("dcp", tmp_path, tmp_path / "run")


@pytest.mark.system
def test_a_gpt_with_tied_weights_goes_to_transformers(tmp_path: Path):
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=32)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with Saver(tmp_path / "run") as saver:
        saver.save({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, 5).wait(300)
    ckpt("export", tmp_path / "run", "hf", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(20).reshape(1, -1)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert again.lm_head.weight is again.transformer.wte.weight


def test_listing_and_showing(tmp_path: Path):
    saved(tmp_path)
    assert [line.split()[0] for line in ckpt("ls", tmp_path).splitlines()] == ["STEP", "2", "1"]
    assert [each["step"] for each in json.loads(ckpt("ls", tmp_path, "--json"))] == [2, 1]
    shown = {each["name"]: each for each in json.loads(ckpt("show", tmp_path, "--json"))["tensors"]}
    assert shown["0.weight"]["shape"] == [8, 4]
    assert shown["0.weight::exp_avg"]["role"] == "moment"
    assert "0.weight::exp_avg" in ckpt("show", tmp_path, "--step", 1)
    (tmp_path / "empty").mkdir()
    assert ckpt("ls", tmp_path / "empty").startswith(f"no step was committed in {tmp_path}/empty\n  hint: ")
    with pytest.raises(ConfigError, match="no such directory"):
        ckpt("ls", tmp_path / "nowhere")


def test_verify_names_each_fault(tmp_path: Path):
    saved(tmp_path)
    assert list(verify(tmp_path, None)) == []
    path = next(tmp_path.rglob("step-000000000001-*/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    data[-1] ^= 1
    path.write_bytes(data)
    faults = list(verify(tmp_path, None))
    assert len(faults) == 2
    assert all("step-000000000001" in fault for fault in faults)
    result = CliRunner().invoke(command, ["verify", str(tmp_path)])
    assert result.exit_code == 1
    assert "2 faults" in result.stdout


def test_diff_says_what_changed_and_by_how_much(tmp_path: Path):
    saved(tmp_path)
    found = {each.name: each for each in diff(tmp_path, 1, 2)}
    assert found["0.weight"].kind == "changed"
    assert 0 < found["0.weight"].max_abs < 0.01
    assert "0.weight" in ckpt("diff", tmp_path, 1, 2)
    assert ckpt("diff", tmp_path, 2, 2) == "no tensor differs\n"


def test_prune_keeps_the_newest(tmp_path: Path):
    saved(tmp_path, steps=4)
    assert ckpt("prune", tmp_path, "--keep-last", 2, "--dry-run").count("would be deleted") == 2
    assert ckpt("prune", tmp_path, "--keep-last", 2).count("deleted") == 2
    assert [each["step"] for each in json.loads(ckpt("ls", tmp_path, "--json"))] == [4, 3]


def test_prune_keeps_the_best_that_it_is_told_of(tmp_path: Path):
    with Saver(tmp_path, keep=[KeepEvery(1)]) as saver:
        for step, loss in enumerate((0.3, 0.1, 0.9, 0.5)):
            saver.save({"a": torch.full((2,), loss)}, step, metrics={"val": loss}).wait(300)
    best = "--keep-best", "val:1", "--keep-best", "val:1:highest"
    kept = json.loads(ckpt("prune", tmp_path, "--keep-last", 1, *best, "--dry-run", "--json"))["kept"]
    assert sorted(step_of(name) for name in kept) == [1, 2, 3]
    with pytest.raises(ConfigError, match="no step has the metric 'vall'"):
        ckpt("prune", tmp_path, "--keep-best", "vall:1", "--dry-run")


def test_odd_safetensors_files(tmp_path: Path):
    tensors = {"a": torch.tensor(1.5), "b": torch.zeros(0, 3), "c": torch.tensor([True]), "d": torch.randn(3).half()}
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_safetensors(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        read_safetensors(tmp_path / "bad.safetensors")


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose groups are in another order than the parameters, after a step."""
    by_kind = [[p for n, p in model.named_parameters() if n.endswith(end)] for end in ("bias", "weight")]
    optimizer = torch.optim.AdamW([{"params": by_kind[0], "weight_decay": 0.0}, {"params": by_kind[1]}])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def same_moments(model: nn.Module, first: torch.optim.Optimizer, second: torch.optim.Optimizer, other: nn.Module):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(first.state[a][key], second.state[b][key]) for a, b in pairs for key in ("exp_avg", "step"))


@pytest.mark.parametrize("kind", ["dcp", "torch"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_and_dcp_hold_everything_by_name(tmp_path: Path, kind: str):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    optimizer = trained(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    extra = {"schedule": schedule, "epoch": 3, "nested": {"x": (torch.ones(2), 0.5)}, "random": torch.Generator()}
    with Saver(tmp_path / "run") as saver:
        saver.save({"model": model, "optimizer": optimizer, **extra}, 5).wait(300)
    out = tmp_path / "out"
    ended = export(tmp_path / "run", kind, out)
    assert (len(ended.tensors), ended.unused) == (len(restore(tmp_path / "run").tensors), [])
    again = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    fresh = trained(again)
    if kind == "torch":
        found = torch.load(out)
        assert list(found["model"]) == list(model.state_dict())
        assert (found["epoch"], found["nested"]["x"][1]) == (3, 0.5)
        assert found["schedule"] == schedule.state_dict()
    else:
        import torch.distributed.checkpoint as dcp

        found = {"model": again.state_dict(), "optimizer": get_optimizer_state_dict(again, fresh), "epoch": 0}
        dcp.load(found, checkpoint_id=out, no_dist=True)
        assert found["epoch"] == 3
    again.load_state_dict(found["model"])
    set_optimizer_state_dict(again, fresh, found["optimizer"])
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    assert same_moments(model, optimizer, fresh, again)
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.0, 0.01]


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_what_was_exported_is_restored_with_its_moments(tmp_path: Path, kind: str):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    optimizer, schedule = trained(model), {"warmup": 10, "rate": float("inf")}
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "random": torch.Generator().manual_seed(3)}
    with Saver(tmp_path / "run") as saver:
        saver.save(state, 5).wait(300)
    export(tmp_path / "run", kind, tmp_path / "out")
    import_(kind, tmp_path / "out", tmp_path / "again")
    before, after = (tensors(opened(tmp_path / name, None)) for name in ("run", "again"))
    assert {n: (t.role, t.digest) for n, t in after.items()} == {n: (t.role, t.digest) for n, t in before.items()}
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    fresh, values, generator = trained(other), {}, torch.Generator()
    restore(tmp_path / "again", into={"model": other, "optimizer": fresh, "schedule": values, "random": generator})
    assert same_moments(model, optimizer, fresh, other)
    assert fresh.param_groups[0]["weight_decay"] == 0.0
    assert (values, generator.initial_seed()) == (schedule, 3)


def test_hf_says_what_it_wrote_and_what_it_left_out(tmp_path: Path):
    model = saved(tmp_path / "run")
    said = ckpt("export", tmp_path / "run", "hf", tmp_path / "out").splitlines()
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert said[0].endswith(f"({len(model.state_dict())} tensors, {size} B, verified)")
    assert said[1].startswith("not exported (hf holds only weights): 0.bias::exp_avg, ")
    everything = ckpt("export", tmp_path / "run", "torch", tmp_path / "out.pt")
    assert f"({len(restore(tmp_path / 'run').tensors)} tensors, " in everything


def test_hf_of_tensors_that_are_of_no_module(tmp_path: Path):
    with Saver(tmp_path / "loose") as saver:
        saver.save({"weight": torch.ones(3), "random": torch.Generator()}, 1).wait(300)
        saver.save({"model": {"w": torch.ones(2)}, "optim": {"m": torch.ones(4)}, "epoch": 3}, 2).wait(300)
        saver.save({"random": torch.Generator()}, 3).wait(300)
    assert export(tmp_path / "loose", "hf", tmp_path / "one", step=1).unused == ["rank0/random"]
    assert list(read_safetensors(tmp_path / "one/model.safetensors")) == ["weight"]
    assert export(tmp_path / "loose", "hf", tmp_path / "two", step=2).unused == ["optim.m", "epoch"]
    assert list(read_safetensors(tmp_path / "two/model.safetensors")) == ["w"]
    with pytest.raises(ConfigError, match="step 3 holds no tensors that hf could"):
        export(tmp_path / "loose", "hf", tmp_path / "three", step=3)
    assert not (tmp_path / "three").exists()


def test_hf_refuses_what_safetensors_would_hold_as_another_tensor(tmp_path: Path):
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.ones(3, dtype=torch.complex128))
    model.register_buffer("angle", torch.ones(3, dtype=torch.complex64))
    with Saver(tmp_path / "run") as saver:
        saver.save({"model": model}, 1).wait(300)
    with pytest.raises(ConfigError, match="safetensors has no complex128: phase") as caught:
        ckpt("export", tmp_path / "run", "hf", tmp_path / "out")
    assert "torch or dcp" in caught.value.hint
    assert not (tmp_path / "out").exists()
    for kind in ("dcp", "torch"):
        export(tmp_path / "run", kind, tmp_path / kind)
        import_(kind, tmp_path / kind, tmp_path / "again", step=len(kind))
        assert torch.equal(restore(tmp_path / "again", step=len(kind)).tensors["phase"], model.phase)


ODD = {
    "d": {1: torch.ones(2), 2: 5},
    "tensors": {1: torch.ones(2), 0: torch.zeros(1)},
    "deep": {0: {1: {"x": 3}}, "list": [{2: torch.ones(1)}, {}, {None: 1.5, True: (1, {3: 4})}]},
    "pairs": {(1, "a"): 2, (): torch.ones(1)},
    "empty": {},
    "empties": [{}, {"a": {}}, []],
    "seed": (1 << 64) - 1,
    "low": -(1 << 63),
}


def test_keys_that_are_not_text_and_empty_dicts_come_back(tmp_path: Path):
    said: list[str] = []
    with Saver(tmp_path / "run") as saver:
        saver.save(ODD, 1).wait(300)
    export(tmp_path / "run", "torch", tmp_path / "out")
    import_("torch", tmp_path / "out", tmp_path / "again", say=said.append)
    first, second = restore(tmp_path / "run"), restore(tmp_path / "again")
    assert {n: repr(v) for n, v in second.values.items()} == {n: repr(v) for n, v in first.values.items()}
    assert said == []
    assert {n: t.tolist() for n, t in second.tensors.items()} == {n: t.tolist() for n, t in first.tensors.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_itself_reads_dicts_with_numbers_for_keys(tmp_path: Path):
    """It fills the tensor of a number, and puts plain values by the number's text."""
    import torch.distributed.checkpoint as dcp

    with Saver(tmp_path / "run") as saver:
        saver.save({"d": {1: torch.ones(2), 2: 5}}, 1).wait(300)
        saver.save({"d": {1: 5, "1": 6}}, 2).wait(300)
    export(tmp_path / "run", "dcp", tmp_path / "out", step=1)
    into = {"d": {1: torch.zeros(2), 2: 0}}
    dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    assert (into["d"][1].tolist(), into["d"]["2"]) == ([1, 1], 5)
    with pytest.raises(ConfigError, match=r"DCP cannot hold it: .*d\.1"):
        export(tmp_path / "run", "dcp", tmp_path / "two", step=2)
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_a_state_without_tensors_there_and_back(tmp_path: Path, kind: str):
    with Saver(tmp_path / "run") as saver:
        saver.save({"epoch": 3, "schedule": {"rate": 0.1}}, 1).wait(300)
    export(tmp_path / "run", kind, tmp_path / "out")
    said = ckpt("import", kind, tmp_path / "out", tmp_path / "again")
    assert said == f"only plain values committed as step 0 of {tmp_path}/again\n"
    assert restore(tmp_path / "again").values == {"epoch": 3, "schedule": {"rate": 0.1}}


def test_what_holds_nothing_is_not_imported(tmp_path: Path):
    said: list[str] = []
    torch.save({}, tmp_path / "empty.pt")
    torch.save({"kind": torch.float16}, tmp_path / "odd.pt")
    for name in ("empty.pt", "odd.pt"):
        with pytest.raises(ConfigError, match="neither a tensor nor a value in"):
            import_("torch", tmp_path / name, tmp_path / "run", say=said.append)
    assert said == ["skipped kind (dtype)"]
    (tmp_path / "hf").mkdir()
    save_file({}, tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no tensor in"):
        import_("hf", tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def ordinary() -> tuple[nn.Module, dict[str, object]]:
    """What an ordinary script saves."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    content = {"model": model.state_dict(), "optim": trained(model).state_dict(), "epoch": 3, "betas": (0.9, 0.99)}
    return model, content


@pytest.mark.parametrize("kind", ["dcp", "torch"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_ordinary_checkpoint_is_imported_with_its_plain_values(tmp_path: Path, kind: str):
    import torch.distributed.checkpoint as dcp

    model, content = ordinary()
    if kind == "torch":
        torch.save(content, tmp_path / "theirs")
    else:
        dcp.save(content, checkpoint_id=tmp_path / "theirs", no_dist=True)
    import_(kind, tmp_path / "theirs", tmp_path / "run")
    found = restore(tmp_path / "run")
    assert found.values["epoch"] == 3
    assert found.values["optim"]["param_groups"][0]["weight_decay"] == 0.0
    assert torch.equal(found.tensors["optim.state.1.exp_avg"], content["optim"]["state"][1]["exp_avg"])
    again = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    restore(tmp_path / "run", into=again, partial=True)
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize(
    "content", [{"a": torch.ones(2), "lr": 0.1}, {"state": {0: torch.ones(2)}}, [torch.ones(2)], torch.ones(2)]
)
def test_any_nesting_is_imported(tmp_path: Path, content: object):
    torch.save(content, tmp_path / "x.pt")
    assert import_("torch", tmp_path / "x.pt", tmp_path / "run") == 1
    assert next(iter(restore(tmp_path / "run").tensors.values())).tolist() == [1, 1]


def test_what_cannot_be_imported_is_named(tmp_path: Path):
    said: list[str] = []
    odd = {"w": torch.ones(2), "kind": torch.float16, "seed": 1 << 90, "sparse": torch.eye(2).to_sparse()}
    torch.save(odd, tmp_path / "odd.pt")
    assert import_("torch", tmp_path / "odd.pt", tmp_path / "run", say=said.append) == 1
    assert [line.split()[1] for line in said] == ["kind", "sparse"]
    assert restore(tmp_path / "run").values["seed"] == 1 << 90
    torch.save({"w": torch.ones(2), "d": {b"x": 3, 4: 5}}, tmp_path / "keys.pt")
    import_("torch", tmp_path / "keys.pt", tmp_path / "run", step=2, say=said.append)
    assert said[-1] == "skipped d.b'x' (its key is a bytes)"
    assert restore(tmp_path / "run").values["d"] == {4: 5}
    torch.save({1: torch.ones(1), "1": torch.zeros(1)}, tmp_path / "twice.pt")
    with pytest.raises(ConfigError, match="two things would be named 1"):
        import_("torch", tmp_path / "twice.pt", tmp_path / "run", step=3)
    torch.save({"w": torch.ones(2), "path": Path("x")}, tmp_path / "class.pt")
    (tmp_path / "noise.pt").write_bytes(b"noise")
    for name, message in (("class.pt", "pathlib"), ("noise.pt", "cannot be read as tensors")):
        with pytest.raises(ConfigError, match=message):
            import_("torch", tmp_path / name, tmp_path / "run", step=1)


def test_transposed_is_not_tied(tmp_path: Path):
    square = torch.arange(4.0).reshape(2, 2)
    torch.save({"a": square, "b": square.t(), "c": square}, tmp_path / "x.pt")
    import_("torch", tmp_path / "x.pt", tmp_path / "run")
    assert {n: t.tolist() for n, t in restore(tmp_path / "run").tensors.items()} == {
        "a": square.tolist(), "b": square.t().tolist(), "c": square.tolist(),
    }  # fmt: skip


def test_a_second_import_says_that_the_step_is_there(tmp_path: Path):
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    words = ["import", "hf", tmp_path / "x.safetensors", tmp_path / "run"]
    assert ckpt(*words) == f"1 tensor committed as step 0 of {tmp_path}/run\n"
    with pytest.raises(ConfigError, match="step 0 is there already"):
        ckpt(*words)
    for step in range(5):
        ckpt(*words, "--step", step)
    for step in (-1, 10**12):
        with pytest.raises(ConfigError, match=f"no such step can be: {step}"):
            ckpt(*words, "--step", step)
    assert {each["step"] for each in json.loads(ckpt("ls", tmp_path / "run", "--json"))} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["hf", "dcp", "torch"])
def test_a_target_that_cannot_be_made_is_the_systems_error(tmp_path: Path, kind: str):
    saved(tmp_path / "run", steps=1)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        export(tmp_path / "run", kind, tmp_path / "file/out")


def test_export_says_which_damaged_step_it_passed_over(tmp_path: Path):
    saved(tmp_path / "run")
    path = next(tmp_path.rglob("step-000000000002-*/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)
    said = ckpt("export", tmp_path / "run", "hf", tmp_path / "out").splitlines()
    assert said[0].startswith("step 1 written")
    assert said[1].startswith("skipped step 2: digest mismatch in step-000000000002")
