"""Every kernel keeps its contract, and a kernel that breaks a rule is caught."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from argosy.kernels import (
    FINITE_NORM,
    LINEAR_CROSS_ENTROPY,
    LINEAR_TOKEN_LOGPROB,
    Kernel,
    RuleBroken,
    check,
    linear_cross_entropy,
)

KERNELS = [LINEAR_CROSS_ENTROPY, LINEAR_TOKEN_LOGPROB, FINITE_NORM]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: each.name)
def test_kernels_keep_their_contract(kernel: Kernel):
    check(kernel)


@pytest.mark.soak
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: each.name)
def test_kernels_compile(kernel: Kernel):
    check(kernel, compiled=True)


def test_a_wrong_value_is_caught():
    wrong = replace(LINEAR_CROSS_ENTROPY, op=lambda h, w, t: linear_cross_entropy(h, w, t) * 1.001)
    with pytest.raises(RuleBroken, match="K3"):
        check(wrong)


def test_a_lost_infinity_is_caught():
    def tame(values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return FINITE_NORM.op([each.nan_to_num(posinf=1.0, neginf=-1.0) for each in values])

    with pytest.raises(RuleBroken, match="K4"):
        check(replace(FINITE_NORM, op=tame))


def test_bits_that_depend_on_threads_are_caught():
    def loose(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, targets) * (1 + 1e-7 * (torch.get_num_threads() == 1))

    with pytest.raises(RuleBroken, match="K5"):
        check(replace(LINEAR_CROSS_ENTROPY, op=loose))


def test_the_logits_are_never_whole():
    """The largest tensor that the op makes is far smaller than the logits."""
    hidden, weight = torch.randn(512, 16), torch.randn(65_536, 16)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel() * result.element_size())
            return result

    with Watch():
        from argosy.kernels.cross_entropy.op import fused

        fused._init_fn(hidden, weight, torch.zeros(512, dtype=torch.long))
    assert 0 < largest <= 20 << 20 < 512 * 65_536 * 4


def test_costs_are_counted():
    hidden, weight, targets = LINEAR_CROSS_ENTROPY.cases(torch.float32)[2]
    flops, moved = LINEAR_CROSS_ENTROPY.cost(hidden, weight, targets)
    assert flops == 6 * 33 * 17 * 101
    assert moved > 0


PINNED = Path(__file__).parent / "gpu_resources.json"
"""What the Triton kernels took when they were last looked at. `python tests/kernels/test_kernels.py` writes it."""


INTERPRETED = """
import torch
from argosy.kernels import FINITE_NORM, LINEAR_CROSS_ENTROPY, LINEAR_TOKEN_LOGPROB, triton_rows
from argosy.kernels.contract import check_values
from argosy.kernels.cross_entropy.cases import case

assert type(triton_rows.row_stats).__name__ == "InterpretedFunction"
for kernel in (LINEAR_CROSS_ENTROPY, LINEAR_TOKEN_LOGPROB, FINITE_NORM):
    for dtype in (torch.float32, torch.float64):
        cases = kernel.cases(dtype)
        if kernel is not FINITE_NORM:  # Rows of several blocks, but fewer than 80: the interpreter is slow.
            cases = [each for each in cases if each[1].shape[0] < 70_000] + [case(3, 4, 5000, dtype)]
        for each in cases:
            check_values(kernel, each)
"""


@pytest.mark.system
def test_triton_versions_keep_the_contract():
    """In Triton's interpreter, on CPU tensors: values and gradients, odd inputs included."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


def resources() -> dict[str, dict[str, dict[str, int]]]:
    from argosy.kernels.offline import TARGETS, measure_resources

    return {t: {name: asdict(each) for name, each in measure_resources(t).items()} for t in TARGETS}


@pytest.mark.system
def test_triton_versions_compile_for_gpus_that_are_not_here():
    """Registers, spills and shared memory get no worse than they were, on five GPUs."""
    pinned, found = json.loads(PINNED.read_text()), resources()
    assert found.keys() == pinned.keys() == {"sm80", "sm90", "sm100", "gfx942", "gfx950"}
    for target, kernels in found.items():
        assert kernels.keys() == pinned[target].keys()
        for name, each in kernels.items():
            assert each["spills"] == 0, (target, name)
            for what, value in each.items():
                assert value <= pinned[target][name][what], (target, name, what)


if __name__ == "__main__":
    PINNED.write_text(json.dumps(resources(), indent=1) + "\n")
