"""The example model: the same training under each of torch's parallelisms, and there and back to transformers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from console import REPOSITORY, Console, terminal
from crew import crews

EXAMPLES = REPOSITORY / "examples"
STEPS = 8
PARALLEL = [("ddp", 2, "alone"), ("fsdp", 2, "alone"), ("pipeline", 2, "alone")]
PARALLEL += [("fsdp_tp", 4, "alone"), ("experts", 2, "moe"), ("experts", 4, "moe")]

TIED = """
import sys
sys.path.insert(0, {examples!r})
from gpt import GPT, Config, loss_of, shard, shard_and_split
from torch.distributed.device_mesh import init_device_mesh
form()
torch.manual_seed(0)
model = GPT(Config(tie_word_embeddings=True))
place, places = 0, 1
if round == "fsdp":
    shard(model, init_device_mesh("cpu", (size,)))
    place, places = rank, size
elif round == "fsdp_tp":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    shard_and_split(model, mesh)
    place, places = mesh.get_local_rank("data"), 2
assert model.lm_head.weight is model.embed_tokens.weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # unlike Adam's, its steps tell twice the gradient from it
tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(0)).chunk(places)[place]
for _ in range(4):
    loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach(), dist.ReduceOp.AVG)
    print(mean.item())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """One terminal for all: its daemons stay warm."""
    with terminal(tmp_path_factory.mktemp("examples")) as console:
        yield console


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the example, and its neighbours importable."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import gpt

    return gpt


def trained(shell: Console, how: str, ranks: int) -> list[tuple[float, float]]:
    """The loss and the norm of the gradients at each step; the weights are then in the directory `how`-`ranks`."""
    if not (out := shell.cwd / f"{how}-{ranks}.txt").exists():
        words = ["run", "-n", str(ranks), str(EXAMPLES / "parallel.py"), how, str(STEPS), f"{how}-{ranks}"]
        ended = shell.argosy(*words, env={"OMP_NUM_THREADS": "1"})
        assert ended.code == 0, ended.text
        out.write_bytes(ended.out)
    found = re.findall(r"step \d+ loss (\S+) norm (\S+)", out.read_text())
    return [(float(loss), float(norm)) for loss, norm in found]


@pytest.mark.system
@pytest.mark.parametrize(("how", "ranks", "reference"), PARALLEL)
def test_it_trains_in_parallel_as_in_one_process(
    shell: Console, gpt: ModuleType, how: str, ranks: int, reference: str
) -> None:
    from gpt_hf import load_hf

    alone, parallel = trained(shell, reference, 1), trained(shell, how, ranks)
    assert len(alone) == STEPS
    assert alone[-1][0] < alone[0][0] - 0.5, "it learns"
    for step in range(STEPS):
        assert parallel[step] == pytest.approx(alone[step], rel=1e-3), (step, alone, parallel)
    theirs = load_hf(shell.cwd / f"{reference}-1").state_dict()
    for name, ours in load_hf(shell.cwd / f"{how}-{ranks}").state_dict().items():
        assert (ours - theirs[name]).abs().mean().item() < 1e-4, name


@pytest.mark.system
def test_tied_embeddings_stay_tied_when_spread() -> None:
    script = TIED.format(examples=str(EXAMPLES))
    parties = [(1, "alone"), (2, "fsdp"), (4, "fsdp_tp")]
    alone, sharded, split = crews(script, parties, preload=["torch.distributed.pipelining", "torch.distributed.fsdp"])
    losses = [[float(line) for line in said[0].splitlines()] for said in (alone, sharded, split)]
    assert losses[0][-1] < losses[0][0] - 0.1
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_what_cannot_be_spread_is_refused(gpt: ModuleType) -> None:
    class Two:
        """Stands for a mesh of two ranks, before anything is asked of it."""

        def size(self) -> int:
            return 2

        def get_local_rank(self) -> int:
            return 0

    with pytest.raises(ValueError, match="use spread_experts"):
        gpt.shard_and_split(gpt.GPT(gpt.Config(num_local_experts=4)), Two())
    with pytest.raises(ValueError, match="cannot spread 3 experts over 2 ranks"):
        gpt.spread_experts(gpt.GPT(gpt.Config(num_local_experts=3)), Two())
    with pytest.raises(ValueError, match="2 stages need as many layers"):
        gpt.pipeline(gpt.GPT(gpt.Config(num_hidden_layers=1)), Two(), rows=4, microbatches=2)


def test_each_generated_token_follows_from_those_before_it(gpt: ModuleType) -> None:
    import torch

    torch.manual_seed(0)
    model, start = gpt.GPT(gpt.Config()), torch.randint(256, (2, 5))
    grown = gpt.generate(model, start, 6, temperature=1e-6)  # so cold that the likeliest is drawn
    assert torch.equal(grown[:, :5], start)
    assert torch.equal(model(grown)[:, 4:-1].argmax(-1), grown[:, 5:])


SHAPES = [{}, {"tie_word_embeddings": True}, {"num_local_experts": 4}, {"num_key_value_heads": 4, "rope_theta": 5e5}]


def model_of(gpt: ModuleType, shape: dict[str, int | float | bool]):
    import torch

    torch.manual_seed(1)
    model = gpt.GPT(gpt.Config(**shape))
    for weight in model.parameters():  # so that those that begin as ones differ too
        torch.nn.init.normal_(weight, std=0.2)
    return model


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_go_to_a_checkpoint_and_back(gpt: ModuleType, tmp_path: Path, shape: dict[str, int | bool]) -> None:
    import torch
    from gpt_hf import load_hf, save_hf
    from safetensors.torch import load_file, save_file

    model = model_of(gpt, shape)
    save_hf(tmp_path, model.config, gpt.weights_of(model))
    # Large models come in several files.
    named = list(load_file(tmp_path / "model.safetensors").items())
    save_file(dict(named[: len(named) // 2]), tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(named[len(named) // 2 :]), tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors").unlink()
    again = load_hf(tmp_path)
    assert again.config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "qwen2"),
        ("attention_bias", True),
        ("head_dim", 128),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5}),
    ],
)
def test_a_checkpoint_that_asks_for_more_is_refused(gpt: ModuleType, tmp_path: Path, name: str, value: object) -> None:
    from gpt_hf import load_hf, save_hf

    model = gpt.GPT(gpt.Config())
    save_hf(tmp_path, model.config, gpt.weights_of(model))
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**given, name: value}))
    with pytest.raises(ValueError, match=r"config\.json: "):
        load_hf(tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transformers_computes_the_same(gpt: ModuleType, tmp_path: Path, shape: dict[str, int | bool]) -> None:
    import torch
    import transformers
    from gpt_hf import load_hf, save_hf

    model = model_of(gpt, shape)
    save_hf(tmp_path / "ours", model.config, gpt.weights_of(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(theirs).__name__ == ("MixtralForCausalLM" if "num_local_experts" in shape else "LlamaForCausalLM")
    tokens = torch.randint(256, (3, 40))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_hf(tmp_path / "theirs").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(again[name], weight), name
