"""A captured step computes what the eager step computes, on one rank and on simulated ones, or is refused."""

import pytest
import torch
from graph.models import Tiny, batch, eager, loss, tiny
from torch import nn

from argosy.core import ConfigError
from argosy.cost import Recipe
from argosy.graph import CannotCapture, Training, capture, capture_optimizer, run_ranks


def check(training: Training, model: nn.Module, recipe: Recipe, tolerance: float = 1e-12) -> None:
    """Compare the captured step on simulated ranks with the eager step of the whole model, in fp64."""
    torch.manual_seed(0)
    step = capture(training.of_model(model), recipe)
    batches = [training.batch(recipe.micro) for _ in range(recipe.dp * recipe.fsdp)]
    with torch.no_grad():
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
    results = run_ranks(step, state, dict(model.named_buffers()), batches)
    expected, grads = eager(training, model, batches)
    losses = torch.stack([rank[0] for rank in results[:: recipe.tp]])
    assert torch.allclose(losses.mean(), expected, rtol=tolerance, atol=0)
    for rank, (_, *found) in enumerate(results):
        for (name, each), grad in zip(((n, s) for n, s in step.shards.items() if s.trained), found, strict=True):
            if name not in grads:
                assert grad is None
                continue
            wanted = each.local(grads[name], recipe, rank)
            assert torch.allclose(grad, wanted, rtol=tolerance, atol=tolerance), (rank, name)


def fp64(model: nn.Module) -> nn.Module:
    return model.double()


def test_one_rank_is_bitwise_equal_to_eager():
    model, training = Tiny(), tiny()
    step = capture(training.of_model(model), Recipe(micro=3))
    rows = batch(3)
    found = run_ranks(step, dict(model.named_parameters()), dict(model.named_buffers()), [rows])[0]
    expected, grads = eager(training, model, [rows])
    assert torch.equal(found[0], expected)
    assert all(torch.equal(a, b) for a, b in zip(found[1:], grads.values(), strict=True))


@pytest.mark.parametrize(
    ("text", "tied"),
    [("fsdp=4 micro=2", True), ("dp=2 fsdp=2", False), ("fsdp=2 tp=2 recompute=full", True), ("dp=3", False)],
)
def test_ranks_compute_the_gradients_of_the_whole_model(text: str, tied: bool):
    recipe = Recipe.parse(text)
    training = tiny()
    check(training, fp64(Tiny(tied=tied, layers=1)), recipe)


def test_frozen_unused_and_scalar_parameters():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 7)
            self.unused = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.body.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.scale

    training = Training(Odd, lambda n: (torch.randn(n, 5, dtype=torch.float64),), lambda m, x: m(x).square().mean())
    check(training, fp64(Odd()), Recipe(fsdp=4, micro=3))


def test_operations_know_their_module_and_line():
    step = capture(tiny(), Recipe(fsdp=4))
    calls = [node.meta["argosy"] for node in step.graph.nodes if node.op == "call_function"]
    assert sum(bool(each["path"]) for each in calls) > 0.9 * len(calls)
    assert sum("models.py:" in each["line"] for each in calls) > 0.9 * len(calls)
    assert {each["phase"] for each in calls} == {"forward", "backward"}
    assert {each["path"] for each in calls if each["phase"] == "backward"} >= {"blocks.0.fc1", "blocks.1.attention"}


def test_the_optimizer_is_captured():
    training = tiny()
    update = capture_optimizer(training, capture(training, Recipe(fsdp=4)))
    assert any("addcdiv" in str(node.target) for node in update.graph.nodes)


def refused(function: object, wanted: str, line: str = "") -> None:
    training = Training(Tiny, batch, function)  # pyright: ignore
    with pytest.raises(CannotCapture, match=wanted) as caught:
        capture(training)
    if line:
        assert line in caught.value.place
        assert "test_capture.py:" in caught.value.place


def test_data_dependent_branches_are_refused_with_the_line():
    def branch(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = loss(model, x, y)
        if total > 3:
            return total * 2
        return total

    refused(branch, "depends on the values", "if total > 3")
    refused(lambda m, x, y: loss(m, x, y) * x.sum().item(), "depends on the values", "item()")


def test_a_loss_without_gradient_is_refused():
    refused(lambda m, x, y: m(x).argmax().float(), "no gradient")


def test_unknown_operations_are_refused_with_the_line():
    @torch.library.custom_op("argosy_test::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    refused(lambda m, x, y: mystery(m(x)).sum(), "fake", "mystery(m(x))")


def test_wrapped_models_are_refused_by_name():
    class DistributedDataParallel(nn.Module):
        pass

    model = nn.Sequential(DistributedDataParallel(), nn.Linear(2, 2))
    with pytest.raises(CannotCapture, match="wrapped in DistributedDataParallel"):
        capture(Training(lambda: model, batch, loss))


def test_a_recipe_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"does not divide blocks.0.attention.q_proj: 12"):
        capture(tiny(), Recipe(tp=5))
    with pytest.raises(ConfigError, match="no linear layer"):
        capture(Training(lambda: nn.Linear(4, 4), batch, loss), Recipe(tp=2))


def test_the_model_is_left_as_it_was():
    model = Tiny()
    classes = [type(each) for each in model.modules()]
    capture(tiny().of_model(model), Recipe(fsdp=2, recompute="full"))
    assert [type(each) for each in model.modules()] == classes
    assert model(batch(1)[0]).shape == (1, 6, 27)


@pytest.mark.parametrize("text", ["fsdp=x", "dp", "speed=3", "dp=0", "recompute=some", "reshard=maybe", "chunks=2"])
def test_bad_recipes_are_refused(text: str):
    with pytest.raises(ConfigError):
        Recipe.parse(text)


def test_a_recipe_reads_what_it_prints():
    recipe = Recipe.parse("dp=2, fsdp=4 tp=8 recompute=full reshard=false")
    assert Recipe.parse(str(recipe)) == recipe
    assert recipe.world == 64
