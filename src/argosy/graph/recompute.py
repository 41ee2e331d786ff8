"""The pass that computes activations again in the backward pass, until the predicted peak fits into the chip.

Which share of the activations must go is searched against the predicted peak: the peak does not follow the share.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from argosy.cost import Chip, memory_profile
from argosy.graph import _torch
from argosy.graph.lowering import is_view, lower, nbytes, tensors
from argosy.graph.step_capture import StepGraph

SHARES = (0.25, 0.5, 0.75, 1.0)
COSTLY = ("mm", "attention", "convolution", "cross_entropy")


def recompute(step: StepGraph, chip: Chip) -> StepGraph:
    """Recompute as few activations as the chip's memory needs; matrix products only if the rest is not enough."""
    from argosy.graph.passes import refresh_values

    if memory_profile(lower(step)).peak <= chip.memory_bytes:
        return step
    best, best_peak = step, memory_profile(lower(step)).peak
    for costly in (False, True):
        for share in SHARES:
            tried = step.copy()
            if not tag(tried.graph, share, costly=costly):
                continue
            tried.module = _torch.recompute_tagged(tried.module)
            mark_phases(tried.graph)
            refresh_values(tried)
            peak = memory_profile(lower(tried)).peak
            if peak < best_peak:
                best, best_peak = tried, peak
            if peak <= chip.memory_bytes:
                return best
    return best


def tag(graph: fx.Graph, share: float, *, costly: bool) -> int:
    """Mark the largest activations, so many that `share` of their bytes is recomputed; return how many."""
    found = sorted(candidates(graph, costly=costly), key=size, reverse=True)
    left = share * sum(map(size, found))
    count = 0
    for node in found:
        if left <= 0:
            break
        left -= size(node)
        node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, 0
        count += 1
    return count


def candidates(graph: fx.Graph, *, costly: bool) -> list[fx.Node]:
    """Operations of the forward pass that can run again: no collective, no random numbers, no result of the step."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or phase(node) != "forward" or not tensors(node.meta.get("val")):
            continue
        target: Any = node.target
        drawn = isinstance(target, _torch.OpOverload) and (
            torch.Tag.nondeterministic_seeded in target.tags or "_c10d" in target.namespace
        )
        heavy = any(word in str(target) for word in COSTLY)
        ends = any(user.op == "output" for user in node.users)
        if not drawn and not ends and (costly or not heavy) and (costly or not is_view(node)):
            found.append(node)
    return found


def size(node: fx.Node) -> int:
    return sum(nbytes(each) for each in tensors(node.meta.get("val")))


def phase(node: fx.Node) -> str:
    return (node.meta.get("argosy") or {}).get("phase", "")


def mark_phases(graph: fx.Graph) -> None:
    """What runs after the backward pass began belongs to it."""
    begun = False
    for node in graph.nodes:
        node.meta.pop("recompute", None)
        if node.op == "call_function":
            begun = begun or phase(node) == "backward"
            node.meta["argosy"] = {**(node.meta.get("argosy") or {}), "phase": "backward" if begun else "forward"}
