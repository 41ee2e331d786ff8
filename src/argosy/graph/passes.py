"""The passes, in order. A pass is a function of a step and a chip that returns a step; users add theirs to the list.

A pass changes a copy that it is handed. What it returns is checked by a certificate before it is used.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import difflib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from argosy.core import ConfigError
from argosy.cost import Chip, estimate
from argosy.graph import _torch
from argosy.graph.fuse_loss import fuse_loss
from argosy.graph.lowering import lower
from argosy.graph.recompute import recompute
from argosy.graph.step_capture import StepGraph
from argosy.graph.training import load_name

Pass = Callable[[StepGraph, Chip], StepGraph]
aten: Any = torch.ops.aten
WAIT, ALL_REDUCE = _torch.c10d.wait_tensor.default, _torch.c10d.all_reduce.default
GATHER = _torch.c10d.all_gather_into_tensor.default
COLLECTIVE_NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
BUCKETS_MB = (25.0, 200.0, 2000.0)


def canonicalise(step: StepGraph, _chip: Chip) -> StepGraph:
    """Drop what nothing reads, and aliases that only rename."""
    for node in list(step.graph.nodes):
        if node.op == "call_function" and node.target in (aten.alias.default, aten.detach.default):
            source = node.args[0]
            if isinstance(source, fx.Node) and not any(is_mutating(user) for user in (*node.users, *source.users)):
                node.replace_all_uses_with(source)
    step.graph.eliminate_dead_code(is_impure_node=is_mutating)
    return step


def merge_sums(step: StepGraph, _chip: Chip) -> StepGraph:
    """Sum before communicating: `all_reduce(a) + all_reduce(b)` is `all_reduce(a + b)`, one collective fewer."""
    for root in [node for node in step.graph.nodes if is_add(node)]:
        if len(root.users) == 1 and is_add(next(iter(root.users))):
            continue  # A part of a larger sum.
        terms = terms_of(root)
        sums: list[Any] = [each for each in terms if only_sum(each)]
        groups = {each.args[0].args[1:] for each in sums}
        if len(sums) < 2 or len(groups) != 1 or any(look(each) != look(root) for each in terms):
            continue
        with step.graph.inserting_before(root):
            total = sums[0].args[0].args[0]
            for each in sums[1:]:
                total = like(step.graph.call_function(aten.add.Tensor, (total, each.args[0].args[0])), root)
            total = like(step.graph.call_function(ALL_REDUCE, (total, *groups.pop())), root)
            total = like(step.graph.call_function(WAIT, (total,)), root)
            for each in terms:
                if each not in sums:
                    total = like(step.graph.call_function(aten.add.Tensor, (each, total)), root)
        root.replace_all_uses_with(total)
    step.graph.eliminate_dead_code(is_impure_node=is_mutating)
    return step


def is_add(node: fx.Node) -> bool:
    plain = node.op == "call_function" and node.target is aten.add.Tensor and not node.kwargs
    return plain and all(isinstance(each, fx.Node) for each in node.args)


def terms_of(root: fx.Node) -> list[fx.Node]:
    """The terms of a sum of sums, in order."""
    terms: list[fx.Node] = []
    for each in root.args:
        assert isinstance(each, fx.Node)
        terms += terms_of(each) if is_add(each) and len(each.users) == 1 else [each]
    return terms


def look(node: fx.Node) -> Any:
    """Shape and dtype of the value of a node."""
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def bucket(step: StepGraph, chip: Chip) -> StepGraph:
    """Join small collectives into large ones; the sizes are those that the chip's prices favour."""
    if not any(dim == "fsdp" for dim in step.groups):
        return step
    best, best_s = step, seconds(step, chip)
    for size in BUCKETS_MB:
        tried = step.copy()
        for join in (_torch.bucket_all_gather, _torch.bucket_reduce_scatter):
            join(tried.module, lambda _index, size=size: size)
            _torch.stable_topological_sort(tried.graph)
        describe_new(tried.graph)
        tried_s = seconds(tried, chip)
        if tried_s < best_s:
            best, best_s = tried, tried_s
    return best


def reshard(step: StepGraph, _chip: Chip) -> StepGraph:
    """Gather parameters again for the backward pass instead of keeping them: less memory, more communication."""
    return regathered(step)


def regathered(step: StepGraph) -> StepGraph:
    """Insert a second gather before the first reader in the backward pass, where the recipe reshards."""
    if not step.recipe.reshard or "fsdp" not in step.groups:
        return step
    order = {node: index for index, node in enumerate(step.graph.nodes)}
    start = next((i for node, i in order.items() if phase_of(node) == "backward"), len(order))
    for gather in [n for n in step.graph.nodes if n.op == "call_function" and n.target is GATHER]:
        if order[gather] >= start:
            continue
        for reader, chain in backward_readers(gather, order, start):
            with step.graph.inserting_before(reader):
                copies: dict[fx.Node, fx.Node] = {}
                for each in (*source_chain(gather), gather, *chain):
                    copies[each] = step.graph.node_copy(each, lambda n, copies=copies: copies.get(n, n))
                    copies[each].meta = {**each.meta, "argosy": {**each.meta["argosy"], "phase": "backward"}}
            for user in [u for u in chain[-1].users if order.get(u, start) >= start and u not in copies.values()]:
                user.replace_input_with(chain[-1], copies[chain[-1]])
    refresh_values(step)
    return step


def refresh_values(step: StepGraph) -> None:
    """Give each node a fake value of its own: copied nodes share theirs, and with it the storage."""
    inputs = [node.meta["val"] for node in step.graph.nodes if node.op == "placeholder"]
    mode = next(each.fake_mode for each in inputs if hasattr(each, "fake_mode"))
    _torch.FakeTensorProp(step.module, mode).propagate_dont_convert_inputs(*inputs)


def backward_readers(gather: fx.Node, order: dict[fx.Node, int], start: int) -> list[tuple[fx.Node, list[fx.Node]]]:
    """The views of a gathered parameter that the backward pass reads: its first reader, and the way to the view."""
    found: list[tuple[fx.Node, list[fx.Node]]] = []
    ways = [[wait] for wait in gather.users]
    while ways:
        way = ways.pop()
        later = [user for user in way[-1].users if order.get(user, start) >= start]
        if later:
            found.append((min(later, key=lambda each: order[each]), way))
        ways += [[*way, user] for user in way[-1].users if order.get(user, start) < start and is_plain_view(user)]
    return found


def source_chain(gather: fx.Node) -> list[fx.Node]:
    """The casts between a parameter and its gather."""
    source = gather.args[0]
    chain: list[fx.Node] = []
    while isinstance(source, fx.Node) and source.op == "call_function" and len(source.all_input_nodes) == 1:
        chain.insert(0, source)
        source = source.args[0]
    return chain


def is_plain_view(node: fx.Node) -> bool:
    names = (aten.t.default, aten.view.default, aten.slice.Tensor, aten.alias.default, aten.transpose.int)
    return node.op == "call_function" and node.target in names


def seconds(step: StepGraph, chip: Chip) -> float:
    """The predicted time of a step, without the optimizer."""
    found = estimate(lower(step), step.recipe, chip)
    return found["forward"] + found["backward"]


def is_mutating(node: fx.Node) -> bool:
    """Whether the node has an effect beyond its result: it writes into an input, or draws random numbers."""
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        return True
    if not isinstance(target, _torch.OpOverload):
        return target is not operator.getitem
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def is_collective(node: fx.Node) -> bool:
    target: Any = node.target
    return (
        node.op == "call_function"
        and getattr(target, "namespace", "") == "_c10d_functional"
        and str(target._opname).startswith(COLLECTIVE_NAMES)
    )


def only_sum(node: fx.Node) -> bool:
    """Whether this is the awaited sum over ranks of something, read by one operation alone."""
    source = node.args[0] if node.op == "call_function" and node.target is WAIT else None
    return isinstance(source, fx.Node) and source.target is ALL_REDUCE and len(node.users) == len(source.users) == 1


def like(node: fx.Node, other: fx.Node) -> fx.Node:
    node.meta = dict(other.meta)
    return node


def phase_of(node: fx.Node) -> str:
    return (node.meta.get("argosy") or {}).get("phase", "")


def describe_new(graph: fx.Graph) -> None:
    """Give nodes that a pass made the phase, module and line of the node before them."""
    known: dict[str, str] = {"phase": "forward", "path": "", "line": ""}
    for node in graph.nodes:
        if node.op == "call_function":
            known = node.meta.setdefault("argosy", known)


PASSES: dict[str, Pass] = {
    "canonicalise": canonicalise,
    "merge_sums": merge_sums,
    "fuse_loss": fuse_loss,
    "bucket": bucket,
    "reshard": reshard,
    "recompute": recompute,
}
"""Name → pass, in the order in which they run."""


def select_passes(names: tuple[str, ...]) -> dict[str, Pass]:
    """The passes of these names, all of them if there are none; `FILE:NAME` is a pass of the user's.

    Raises:
        ConfigError: there is no such pass.
    """
    found: dict[str, Pass] = {}
    for name in names or tuple(PASSES):
        path, colon, inner = name.rpartition(":")
        if colon:
            found[inner] = load_name(path, inner)
        elif name in PASSES:
            found[name] = PASSES[name]
        else:
            raise ConfigError(f"no such pass: {name}", hint=f"{', '.join(PASSES)}, or FILE:NAME")
    return found


def graph_diff(before: StepGraph, after: StepGraph) -> str:
    """The lines that a pass removed and added."""
    old, new = (str(each.graph).splitlines() for each in (before, after))
    return "\n".join(difflib.unified_diff(old, new, "before", "after", lineterm="", n=0))
