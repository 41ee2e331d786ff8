"""One figure for bench/graph.py: the peak of a loss in MB, or what capturing 32 layers takes."""

import resource
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F


def status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def loss_peak_mb(kind: str, rows: int, width: int, vocabulary: int) -> float:
    """The highest resident memory during forward and backward, beyond what was there and the gradients."""
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (rows,))
    if kind == "argosy":
        from argosy.kernels import linear_cross_entropy as loss
    else:

        def loss(hidden, weight, targets):
            return F.cross_entropy(F.linear(hidden, weight), targets)

    small = torch.randn(64, width, requires_grad=True)  # Libraries allocate at their first use.
    loss(small, weight.detach()[:64], targets[:64] % 64).backward()
    Path("/proc/self/clear_refs").write_text("5")  # Forget the highest so far.
    before = status_kib("VmRSS")
    loss(hidden, weight, targets).backward()
    gradients = (hidden.numel() + weight.numel()) * 4 / 1e6
    return (status_kib("VmHWM") - before) * 1024 / 1e6 - gradients


def capture_32_layers() -> tuple[float, float]:
    """CPU seconds and peak MB."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    from predict import training

    from argosy.cost import Recipe
    from argosy.graph import capture

    began = time.process_time()
    step = capture(training, Recipe.parse("fsdp=1024 dtype=bf16"))
    took = time.process_time() - began
    assert step.layers_captured == 32
    return took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "loss":
        print(loss_peak_mb(sys.argv[2], *map(int, sys.argv[3:6])))
    else:
        print(capture_32_layers()[what == "capture-memory"])
