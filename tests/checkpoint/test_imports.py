"""What others saved comes into a live model: buffers that files cannot tell from parameters, moments by names."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from argosy.checkpoint import Saver, import_, restore
from argosy.core import ConfigError


class Normed(nn.Module):
    """With BatchNorm's buffers and a float one, which files cannot tell from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.norm(self.conv(x)) * self.scale[:, None, None]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["torch", "hf", "dcp"])
@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_of_other_formats_come_into_buffers(tmp_path: Path, kind: str, compiled: bool):
    """The names that DDP or torch.compile give are of no use to anybody, but people save them: `rename` helps."""
    model, other = Normed(), Normed()
    model(torch.randn(4, 2, 5, 5))
    held = {f"_orig_mod.{name}" if compiled else name: tensor for name, tensor in model.state_dict().items()}
    source = tmp_path / "source"
    if kind == "torch":
        torch.save(held, source)
    elif kind == "dcp":
        dcp.save({"model": held}, checkpoint_id=source, no_dist=True)
    else:
        source.mkdir()
        save_file(held, source / "model.safetensors")
    import_(kind, source, tmp_path / "run")
    restore(tmp_path / "run", into=other, rename=lambda name: name.removeprefix("_orig_mod."))
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    wrong = nn.Sequential(*other.children())
    with pytest.raises(ConfigError, match="no place for stored"):
        restore(tmp_path / "run", into=wrong)


class Shadow:
    """An average that gives copies of its tensors, and takes them back by load_state_dict."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("there", [(), ("shadow",), ("plain",), ("shadow", "plain")])
def test_tensors_of_other_formats_come_into_what_is_no_module(tmp_path: Path, there: tuple[str, ...]):
    """They are one tensor in the file; here those named in `there` have one each already."""
    tensors = {"w": torch.randn(3)}
    torch.save({"model": nn.Linear(2, 2).state_dict(), "shadow": tensors, "plain": tensors}, tmp_path / "x.pt")
    import_("torch", tmp_path / "x.pt", tmp_path / "run")
    here = {name: {"w": torch.zeros(3)} if name in there else {} for name in ("shadow", "plain")}
    shadow, plain = Shadow(**here["shadow"]), here["plain"]
    restore(tmp_path / "run", into={"model": nn.Linear(2, 2), "shadow": shadow, "plain": plain})
    assert torch.equal(shadow.tensors["w"], tensors["w"])
    assert torch.equal(plain["w"], tensors["w"])


class Squares(nn.Module):
    """All shapes are equal, so they say nothing about the order; two names are one tensor, and one is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3, 3))
        self.a, self.b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
        self.tied, self.c = self.a, nn.Parameter(torch.randn(3, 3))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def same_moments(first: dict[nn.Parameter, dict], second: dict[nn.Parameter, dict], old: nn.Module, new: nn.Module):
    return all(
        torch.equal(first[getattr(old, name)][key], second[getattr(new, name)][key])
        for name in "abc"
        for key in ("step", "exp_avg", "exp_avg_sq")
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_that_dcp_describes_and_no_file_has_is_refused(tmp_path: Path):
    dcp.save({"a": torch.ones(2), "b": torch.ones(3), "none": torch.ones(0, 4)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for name, words in (("none", None), ("b", "b is not whole: no file has it")):
        metadata.storage_data = {index: at for index, at in metadata.storage_data.items() if index.fqn != name}
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        if words is None:
            assert import_("dcp", tmp_path, tmp_path / "run") == 3
            continue
        with pytest.raises(ConfigError, match=words):
            import_("dcp", tmp_path, tmp_path / "run", step=1)
    assert restore(tmp_path / "run").tensors["none"].shape == (0, 4)


@pytest.mark.parametrize(
    "odd",
    [
        {"param_groups": 3},
        {"state": {}, "param_groups": [{"params": 3}]},
        {"state": {}, "param_groups": [{"params": [[1]]}]},
        {"state": {"w": 3}, "param_groups": [{"params": ["w"]}]},
        {"state": {0: 3}, "param_groups": [{"params": [0]}]},
    ],
)
def test_what_only_looks_like_an_optimizer_is_kept_as_it_is(tmp_path: Path, odd: dict[str, object]):
    torch.save({"model": {"w": torch.ones(2)}, "o": odd}, tmp_path / "x")
    assert import_("torch", tmp_path / "x", tmp_path / "run") == 1
    assert set(restore(tmp_path / "run").values["o"]) == set(odd)


def test_tensors_in_lists_of_an_optimizer_stay_tensors(tmp_path: Path):
    said: list[str] = []
    state = {"state": {"w": {"history": [torch.ones(3)]}}, "param_groups": [{"params": ["w"]}]}
    torch.save({"model": {"w": torch.ones(2)}, "o": state}, tmp_path / "x")
    import_("torch", tmp_path / "x", tmp_path / "run", say=said.append)
    assert torch.equal(restore(tmp_path / "run").tensors["o.state.w.history.0"], torch.ones(3))
    assert said[0].startswith("o: its state has tensors in lists or dicts, so it is kept as it is")


def test_moments_of_nobody_knows_whom_are_kept_and_that_is_said(tmp_path: Path):
    model, said = Squares(), list[str]()
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, tmp_path / "x")
    import_("torch", tmp_path / "x", tmp_path / "run", say=said.append)
    (line,) = said
    assert line.startswith("opt: its state goes by numbers, so it is kept as it is")
    assert "load the file into the optimizer in a script" in line
    found = restore(tmp_path / "run").tensors["opt.state.0.exp_avg"]
    assert torch.equal(found, optimizer.state[model.a]["exp_avg"])
    with pytest.raises(ConfigError, match=r"no place for stored opt\.state\.0\.exp_avg"):
        restore(tmp_path / "run", into={"model": model, "opt": optimizer})


def test_the_names_that_an_optimizer_was_given_are_not_saved_with_each_parameter(tmp_path: Path):
    """They would be a list of all names for each of them, and stay those of the other order."""
    model, other = Squares(), Squares()
    optimizer = stepped(model, torch.optim.AdamW(model.named_parameters()))
    with Saver(tmp_path) as saver:
        saver.save({"m": model, "o": optimizer}, 1).wait(300)
    assert "param_names" not in restore(tmp_path).options["a"]
    second = torch.optim.AdamW([*other.named_parameters()][::-1])
    restore(tmp_path, into={"m": other, "o": second})
    assert second.param_groups[0]["param_names"] == ["c", "b", "a"]
    assert same_moments(optimizer.state, second.state, model, other)
