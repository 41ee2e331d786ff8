"""Twenty passes that break a step, each in a way that a real pass might. Certificates must catch every one."""

from typing import Any

import torch
from torch import fx

from argosy.cost import Chip
from argosy.graph import StepGraph

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
TURNS = [0]


def calls(step: StepGraph, target: object) -> list[fx.Node]:
    return [node for node in step.graph.nodes if node.op == "call_function" and node.target is target]


def results(step: StepGraph) -> tuple[fx.Node, list[Any]]:
    node = next(each for each in step.graph.nodes if each.op == "output")
    return node, list(node.args[0])


def dropped_wait(step: StepGraph, _: Chip) -> StepGraph:
    wait = calls(step, c10d.wait_tensor.default)[0]
    wait.replace_all_uses_with(wait.args[0])
    step.graph.erase_node(wait)
    return step


def dropped_wait_of_a_gradient(step: StepGraph, _: Chip) -> StepGraph:
    wait = calls(step, c10d.wait_tensor.default)[-1]
    wait.replace_all_uses_with(wait.args[0])
    step.graph.erase_node(wait)
    return step


def swapped_collectives_on_one_rank(step: StepGraph, _: Chip) -> StepGraph:
    """Every second call acts as another rank."""
    TURNS[0] += 1
    if TURNS[0] % 2:
        first, second = calls(step, c10d.all_gather_into_tensor.default)[:2]
        first.prepend(second)
    return step


def collective_only_on_one_rank(step: StepGraph, _: Chip) -> StepGraph:
    TURNS[0] += 1
    if TURNS[0] % 2:
        gather = calls(step, c10d.all_gather_into_tensor.default)[0]
        with step.graph.inserting_after(gather):
            again = step.graph.node_copy(gather)
        with step.graph.inserting_after(again):
            step.graph.call_function(c10d.wait_tensor.default, (again,))
    return step


def max_instead_of_sum(step: StepGraph, _: Chip) -> StepGraph:
    node = calls(step, c10d.reduce_scatter_tensor.default)[0]
    node.args = (node.args[0], "max", *node.args[2:])
    return step


def max_over_tensor_parallel_ranks(step: StepGraph, _: Chip) -> StepGraph:
    node = calls(step, c10d.all_reduce.default)[0]
    node.args = (node.args[0], "max", *node.args[2:])
    return step


def wrong_group(step: StepGraph, _: Chip) -> StepGraph:
    node = calls(step, c10d.all_reduce.default)[0]
    node.args = (*node.args[:2], step.groups["fsdp"])
    return step


def gradient_not_divided(step: StepGraph, _: Chip) -> StepGraph:
    node = calls(step, aten.div.Tensor)[-1]
    node.replace_all_uses_with(node.args[0])
    step.graph.erase_node(node)
    return step


def gradient_divided_twice(step: StepGraph, _: Chip) -> StepGraph:
    node = calls(step, aten.div.Tensor)[-1]
    node.args = (node.args[0], 4)
    return step


def lost_tied_weight(step: StepGraph, _: Chip) -> StepGraph:
    """A tied weight gets the gradient of one of its two uses."""
    gradient = results(step)[1][1]
    seen, todo = set[fx.Node](), [gradient]
    while todo:
        node = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_function" and node.target is aten.add.Tensor:
            node.replace_all_uses_with(node.args[0])
            return step
        todo += [each for each in node.all_input_nodes if "backward" in str(each.meta.get("argosy"))]
    raise AssertionError("the model has no tied weight")


def swapped_gradients(step: StepGraph, _: Chip) -> StepGraph:
    node, values = results(step)
    same = {}
    for index, value in enumerate(values[1:], 1):
        shape = tuple(value.meta["val"].shape)
        if shape in same:
            values[index], values[same[shape]] = values[same[shape]], values[index]
            break
        same[shape] = index
    node.args = (tuple(values),)
    return step


def missing_output(step: StepGraph, _: Chip) -> StepGraph:
    node, values = results(step)
    node.args = (tuple(values[:-1]),)
    return step


def gradient_of_nothing(step: StepGraph, _: Chip) -> StepGraph:
    node, values = results(step)
    node.args = ((*values[:-1], None),)
    return step


def zero_gradient(step: StepGraph, _: Chip) -> StepGraph:
    node, values = results(step)
    with step.graph.inserting_before(node):
        zero = step.graph.call_function(aten.mul.Tensor, (values[2], 0))
    zero.meta = dict(values[2].meta)
    values[2] = zero
    node.args = (tuple(values),)
    return step


def transposed_product(step: StepGraph, _: Chip) -> StepGraph:
    node = calls(step, aten.mm.default)[0]
    node.args = (node.args[1], node.args[0])
    return step


def lost_residual(step: StepGraph, _: Chip) -> StepGraph:
    node = calls(step, aten.add.Tensor)[0]
    node.replace_all_uses_with(node.args[1])
    return step


def sum_instead_of_mean(step: StepGraph, _: Chip) -> StepGraph:
    """Someone takes the loss for a sum instead of a mean."""
    node, values = results(step)
    with step.graph.inserting_before(node):
        total = step.graph.call_function(aten.mul.Tensor, (values[0], 2))
    total.meta = dict(values[0].meta)
    values[0] = total
    node.args = (tuple(values),)
    return step


def gather_of_another_parameter(step: StepGraph, _: Chip) -> StepGraph:
    gathers = calls(step, c10d.all_gather_into_tensor.default)
    for one in gathers:
        for other in gathers:
            if one is not other and one.args[0].meta["val"].shape == other.args[0].meta["val"].shape:
                one.args = (other.args[0], *one.args[1:])
                return step
    raise AssertionError("no two parameters have the same shape")


def half_precision_in_secret(step: StepGraph, _: Chip) -> StepGraph:
    node = calls(step, aten.mm.default)[0]
    with step.graph.inserting_after(node):
        low = step.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.bfloat16})
    with step.graph.inserting_after(low):
        back = step.graph.call_function(aten._to_copy.default, (low,), {"dtype": torch.float32})
    for each in (low, back):
        each.meta = dict(node.meta)
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not low)
    return step


def broken_order(step: StepGraph, _: Chip) -> StepGraph:
    """An operation is moved before what it reads."""
    first = calls(step, c10d.wait_tensor.default)[0]
    reader = next(iter(first.users))
    first.prepend(reader)
    return step


BAD = [
    *(dropped_wait, dropped_wait_of_a_gradient, swapped_collectives_on_one_rank, collective_only_on_one_rank),
    *(max_instead_of_sum, max_over_tensor_parallel_ranks, wrong_group, gradient_not_divided, gradient_divided_twice),
    *(lost_tied_weight, swapped_gradients, missing_output, gradient_of_nothing, zero_gradient, transposed_product),
    *(lost_residual, sum_instead_of_mean, gather_of_another_parameter, half_precision_in_secret, broken_order),
]
