"""Models drawn at random compute what eager computes, in fp64, or are refused with the line."""

import pytest
import torch
from graph.models import eager
from graph.random_models import random_case

from argosy.graph import CannotCapture, capture, run_ranks

TOLERANCE = 1e-10


def agrees(seed: int) -> bool:
    """Whether the model was captured, and then agreed with eager; a refusal must name the line."""
    training, model, recipe = random_case(seed)
    if "routed" in model.kinds:
        with pytest.raises(CannotCapture) as refused:
            capture(training, recipe)
        assert "random_models.py:" in refused.value.place, seed
        return False
    step = capture(training, recipe)
    batches = [training.batch(recipe.micro) for _ in range(recipe.dp * recipe.fsdp)]
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(seed)
    results = run_ranks(step, state, dict(model.named_buffers()), batches)
    torch.manual_seed(seed)
    expected, grads = eager(training, model, batches)
    losses = torch.stack([rank[0] for rank in results if rank[0] is not None])
    assert torch.allclose(losses.mean(), expected, rtol=TOLERANCE, atol=0), seed
    trained = [(name, each) for name, each in step.shards.items() if each.trained]
    for rank, (_, *found) in enumerate(results):
        for (name, each), grad in zip(trained, found, strict=True):
            wanted = each.local(grads[name], recipe, rank) if name in grads else None
            assert (grad is None) == (wanted is None), (seed, name)
            if grad is not None and wanted is not None:
                assert torch.allclose(grad, wanted, rtol=TOLERANCE, atol=TOLERANCE), (seed, rank, name)
    return True


def test_a_few_random_models_agree_or_are_refused():
    found = [agrees(seed) for seed in range(4)]
    assert any(found)


@pytest.mark.system
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_a_hundred_random_models_agree_or_are_refused(first: int):
    found = [agrees(seed) for seed in range(first, first + 10)]
    assert any(found)
