"""The pass that turns a linear layer and its cross-entropy into one kernel that never holds the logits."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from argosy.cost import Chip
from argosy.graph.step_capture import StepGraph
from argosy.kernels import LINEAR_CROSS_ENTROPY

aten: Any = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints)


@dataclass(frozen=True, slots=True)
class LossPattern:
    """The operations of one linear layer with cross-entropy, forward and backward."""

    hidden: fx.Node
    weight: fx.Node
    targets: fx.Node
    loss: fx.Node
    slope: fx.Node
    """What the backward pass multiplies the gradient by: the gradient of the loss itself."""
    d_hidden: fx.Node
    d_weight: fx.Node
    transposed: bool
    """Whether `d_weight` is width x vocabulary."""


def fuse_loss(step: StepGraph, _chip: Chip) -> StepGraph:
    """Replace each linear layer with mean cross-entropy by the kernel: the same values, without logits."""
    from argosy.graph.passes import is_mutating, refresh_values

    fused: Any = LINEAR_CROSS_ENTROPY.overload
    changed = False
    for softmax in [node for node in step.graph.nodes if node.target is aten._log_softmax.default]:
        found = match_loss(softmax)
        if found is None:
            continue
        with step.graph.inserting_before(found.loss):
            whole = step.graph.call_function(fused._opoverload, (found.hidden, found.weight, found.targets))
            parts = [step.graph.call_function(operator.getitem, (whole, index)) for index in range(3)]
        for node in (whole, *parts):
            node.meta = dict(found.loss.meta)
        for old, part in ((found.d_hidden, parts[1]), (found.d_weight, parts[2])):
            with step.graph.inserting_before(old):
                scaled = step.graph.call_function(aten.mul.Tensor, (part, found.slope))
                scaled.meta = dict(old.meta)
                if old is found.d_weight and found.transposed:
                    scaled = step.graph.call_function(aten.t.default, (scaled,))
                    scaled.meta = dict(old.meta)
            old.replace_all_uses_with(scaled)
        for user in list(found.loss.users):
            if user.target is operator.getitem and user.args[1] == 0:
                user.replace_all_uses_with(parts[0])
        changed = True
    if changed:
        step.graph.eliminate_dead_code(is_impure_node=is_mutating)
        refresh_values(step)
    return step


def match_loss(softmax: fx.Node) -> LossPattern | None:
    """The pattern around a log-softmax, if nothing else reads what it would no longer compute."""
    product = up(softmax.args[0])
    if product is None or product.target is not aten.mm.default:
        return None
    hidden, turned = product.args
    if not isinstance(turned, fx.Node) or turned.target is not aten.t.default or not isinstance(hidden, fx.Node):
        return None
    users = {str(user.target): user for user in softmax.users}
    loss = users.pop("aten.nll_loss_forward.default", None)
    nll_back = users.pop("aten.nll_loss_backward.default", None)
    back = users.pop("aten._log_softmax_backward_data.default", None)
    if loss is None or nll_back is None or back is None or users or loss.args[2:] != (None, 1, -100):
        return None
    readers = down(back)
    if readers is None or len(readers) != 2:
        return None
    grads = gradients(readers, turned)
    if grads is None:
        return None
    d_hidden, d_weight, transposed = grads
    weight, targets, slope = turned.args[0], loss.args[1], nll_back.args[0]
    if not all(isinstance(each, fx.Node) for each in (weight, targets, slope)):
        return None
    return LossPattern(hidden, weight, targets, loss, slope, d_hidden, d_weight, transposed)  # pyright: ignore


def gradients(readers: list[tuple[fx.Node, fx.Node]], turned: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """The products that give the gradients of the layer's input and weight, from what reads the logits' gradient."""
    d_hidden: fx.Node | None = None
    d_weight: fx.Node | None = None
    transposed = False
    for source, reader in readers:
        if reader.target is aten.mm.default and reader.args[0] is source and shape(reader)[-1] == shape(turned)[0]:
            d_hidden = reader
        elif reader.target is aten.mm.default:
            d_weight, transposed = reader, True
        elif reader.target is aten.t.default and len(reader.users) == 1:
            d_weight = next(iter(reader.users))
            if d_weight.target is not aten.mm.default or d_weight.args[0] is not reader:
                return None
    return None if d_hidden is None or d_weight is None else (d_hidden, d_weight, transposed)


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def up(node: Any) -> fx.Node | None:
    """Through views that have one reader, to what they view."""
    while isinstance(node, fx.Node) and node.target in VIEWS and len(node.users) == 1:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and len(node.users) == 1 else None


def down(node: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
    """Through views with one reader, to all readers; each with what it reads."""
    while len(node.users) == 1 and next(iter(node.users)).target in VIEWS:
        node = next(iter(node.users))
    return [(node, user) for user in node.users] or None
