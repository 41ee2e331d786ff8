"""Good passes prove themselves, twenty bad ones are caught, and bisecting names the guilty one."""

from dataclasses import replace

import pytest
import torch
from graph.bad_passes import BAD, max_instead_of_sum
from torch import Tensor, nn

from argosy.core import ConfigError
from argosy.cost import Recipe, load_chip, memory_profile
from argosy.graph import PASSES, StepGraph, Training, apply_passes, bisect, capture, graph_diff, lower, select_passes

CPU, H100 = load_chip("cpu"), load_chip("h100")


class Small(nn.Module):
    """A tied embedding, a split pair of layers with a residual, two parameters of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.q_proj, self.k_proj = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.o_proj = nn.Linear(6, 6, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.o_proj(torch.tanh(self.q_proj(x)) * self.k_proj(x))
        return x @ self.embedding.weight.t()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(10, (rows, 3)), torch.randint(10, (rows, 3))


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@pytest.fixture(scope="module")
def step() -> StepGraph:
    return capture(Training(Small, batch, loss), Recipe(fsdp=2, tp=2, micro=2))


def test_good_passes_keep_the_values(step: StepGraph):
    after, found = apply_passes(step, PASSES, CPU)
    by_name = {each.name: each for each in found}
    assert by_name["merge_sums"].kept
    assert by_name["merge_sums"].collectives[1] == by_name["merge_sums"].collectives[0] - 1
    assert by_name["bucket"].kept
    assert by_name["bucket"].collectives[1] < by_name["bucket"].collectives[0] / 2
    assert by_name["bucket"].seconds[1] < by_name["bucket"].seconds[0] * 0.7
    assert all(each.difference is not None and each.difference < 1e-10 for each in found)
    assert "all_gather" in graph_diff(step, after)


def test_a_pass_decides_by_the_chip(step: StepGraph):
    """On a chip that hides communication behind compute, joining small collectives does not pay."""
    only = {"bucket": PASSES["bucket"]}
    assert apply_passes(step, only, CPU)[1][0].verdict == "kept"
    assert apply_passes(step, only, H100, values=False)[1][0].verdict == "unchanged"


def test_resharding_lowers_the_peak():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

    training = Training(Deep, lambda n: (torch.randn(n, 64),), lambda m, x: m(x).square().mean())
    before = capture(training, Recipe(fsdp=4))
    after, found = apply_passes(before, {"reshard": PASSES["reshard"]}, CPU)
    assert found[0].kept, found[0].reason
    assert found[0].difference == 0
    assert memory_profile(lower(after)).peak < 0.7 * memory_profile(lower(before)).peak


def test_recomputing_meets_the_memory_of_the_chip():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.nn.functional.gelu(torch.tanh(layer(x)))
            return x

    training = Training(Deep, lambda n: (torch.randn(n, 16),), lambda m, x: m(x).square().mean())
    before = capture(training, Recipe(micro=256))
    peak = memory_profile(lower(before)).peak
    small = replace(CPU, memory_bytes=0.8 * peak)
    after, found = apply_passes(before, {"recompute": PASSES["recompute"]}, small)
    assert found[0].kept, found[0]
    assert found[0].difference == 0
    assert memory_profile(lower(after)).peak <= 0.8 * peak
    assert apply_passes(before, {"recompute": PASSES["recompute"]}, CPU)[1][0].verdict == "unchanged"


def test_the_loss_is_fused_and_the_logits_are_gone():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(600, 8), nn.Linear(8, 600, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embedding(tokens)))

    training = Training(Wide, lambda n: (torch.randint(600, (n, 16)), torch.randint(600, (n, 16))), loss)
    before = capture(training, Recipe(fsdp=2, micro=4))
    after, found = apply_passes(before, {name: PASSES[name] for name in ("canonicalise", "fuse_loss")}, CPU)
    assert found[1].kept, found[1]
    assert found[1].difference is not None
    assert found[1].difference < 1e-10
    assert not any("log_softmax" in str(node.target) for node in after.graph.nodes)
    assert found[1].peak_bytes[1] < found[1].peak_bytes[0]


@pytest.mark.parametrize("bad", BAD, ids=lambda each: each.__name__)
def test_bad_passes_are_caught(bad: object, step: StepGraph):
    after, found = apply_passes(step, {"bad": bad}, CPU)  # pyright: ignore
    assert found[0].verdict == "dropped", found[0]
    assert found[0].reason
    assert after is step


def test_there_are_twenty_bad_passes():
    assert len(BAD) == 20


def test_bisecting_names_the_guilty_pass(step: StepGraph):
    passes = {**PASSES, "guilty": max_instead_of_sum, "innocent": PASSES["canonicalise"]}
    order = ["canonicalise", "merge_sums", "guilty", "innocent"]
    assert bisect(step, {name: passes[name] for name in order}, CPU) == "guilty"  # pyright: ignore
    assert bisect(step, {name: passes[name] for name in ("canonicalise", "merge_sums")}, CPU) is None  # pyright: ignore


def test_unknown_passes_are_refused():
    assert list(select_passes(())) == list(PASSES)
    with pytest.raises(ConfigError, match="no such pass"):
        select_passes(("polish",))
    with pytest.raises(ConfigError, match="no such file"):
        select_passes(("nowhere.py:polish",))
