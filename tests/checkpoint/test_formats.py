"""Others' formats there and back, and `argosy ckpt`."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from argosy.checkpoint import KeepLast, Saver, diff, export, import_, restore, verify
from argosy.checkpoint.formats import read_safetensors, write_safetensors
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
            saver.save({"model": model, "optimizer": optimizer}, step).wait(30)
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
    into = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(into[name], tensor) for name, tensor in model.state_dict().items())


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
        saver.save({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, 5).wait(30)
    ckpt("export", tmp_path / "run", "hf", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(20).reshape(1, -1)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert again.lm_head.weight is again.transformer.wte.weight


def test_listing_and_showing(tmp_path: Path):
    saved(tmp_path)
    assert [line.split()[0] for line in ckpt("ls", tmp_path).splitlines()] == ["STEP", "2", "1"]
    assert [each["step"] for each in json.loads(ckpt("ls", tmp_path, "--json"))] == [2, 1]
    shown = {each["name"]: each for each in json.loads(ckpt("show", tmp_path, "--json"))}
    assert shown["0.weight"]["shape"] == [8, 4]
    assert shown["0.weight::exp_avg"]["role"] == "moment"
    assert "0.weight::exp_avg" in ckpt("show", tmp_path, "--step", 1)
    (tmp_path / "empty").mkdir()
    assert ckpt("ls", tmp_path / "empty") == "no step was committed here\n"
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
    assert ckpt("prune", tmp_path, "--keep-last", 2, "--dry-run").count("would go") == 2
    assert ckpt("prune", tmp_path, "--keep-last", 2).count("deleted") == 2
    assert [each["step"] for each in json.loads(ckpt("ls", tmp_path, "--json"))] == [4, 3]


def test_odd_safetensors_files(tmp_path: Path):
    tensors = {"a": torch.tensor(1.5), "b": torch.zeros(0, 3), "c": torch.tensor([True]), "d": torch.randn(3).half()}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    found = read_safetensors(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        read_safetensors(tmp_path / "bad.safetensors")
