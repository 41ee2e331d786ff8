"""Divide a step into regions that a compiler can take: runs of plain operations of one layer and one phase.

Collectives, random numbers, writes into inputs, and views of what collectives brought stay outside, in their order.
Two regions with the same text are compiled once, so that a model of equal layers costs as much as one layer.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from argosy.graph import _torch
from argosy.graph.certificate import graph_text
from argosy.graph.lowering import is_view, tensors
from argosy.graph.passes import WAIT, is_collective, is_mutating

SMALLEST = 2
"""Operations that are worth a call into compiled code."""


@dataclass(slots=True)
class Region:
    """Nodes of a step that run as one."""

    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list[fx.Node])
    outputs: list[fx.Node] = field(default_factory=list[fx.Node])

    def module(self) -> fx.GraphModule:
        """The region as a graph of its own, from its inputs to a tuple of its outputs."""
        graph = fx.Graph()
        known: dict[fx.Node, fx.Node] = {}
        for index, each in enumerate(self.inputs):
            known[each] = graph.placeholder(f"x{index}")
            known[each].meta["val"] = each.meta["val"]
        for node in self.nodes:
            known[node] = graph.node_copy(node, lambda n: known[n])
        graph.output(tuple(known[each] for each in self.outputs))
        return fx.GraphModule(torch.nn.Module(), graph)


def find_regions(graph: fx.Graph) -> list[Region]:
    """The regions of a graph in program order."""
    found: list[Region] = []
    fetched: set[fx.Node] = set()
    now: list[fx.Node] = []
    key: tuple[str, str] | None = None
    for node in graph.nodes:
        if node.op != "call_function":
            if node.op == "placeholder":
                fetched.add(node)
            continue
        if stays_outside(node, fetched, now):
            if all(each in fetched for each in node.all_input_nodes) and (is_view(node) or is_empty(node)):
                fetched.add(node)
                continue  # It needs nothing of the region, so it may run before it.
            if is_collective(node) or node.target is WAIT:
                fetched.add(node)
            now, key = close(found, now), None
            continue
        here = layer_of(node)
        if here[1] and key is not None and here != key and now:
            now = close(found, now)
        key = here if here[1] or key is None else key
        now.append(node)
    close(found, now)
    for each in found:
        complete(each)
    return [
        e for e in found if e.outputs and all(isinstance(n.meta.get("val"), Tensor) for n in (*e.inputs, *e.outputs))
    ]


def close(found: list[Region], nodes: list[fx.Node]) -> list[fx.Node]:
    if len(nodes) >= SMALLEST:
        found.append(Region(nodes))
    return []


def stays_outside(node: fx.Node, fetched: set[fx.Node], now: list[fx.Node]) -> bool:
    if is_collective(node) or node.target is WAIT or is_empty(node):
        return True
    if is_view(node):
        return bool(node.all_input_nodes) and all(each in fetched for each in node.all_input_nodes)
    if not isinstance(node.target, _torch.OpOverload) or not tensors(node.meta.get("val")):
        return True
    return is_mutating(node) and not writes_inside(node, now) and not is_sure_attention(node)


def is_empty(node: fx.Node) -> bool:
    """Whether the result is memory that nothing was written to yet."""
    return not node.all_input_nodes and "aten.empty" in str(node.target)


def writes_inside(node: fx.Node, now: list[fx.Node]) -> bool:
    """Whether the operation writes only into what the region made itself."""
    target, written = node.target, node.args[0] if node.args else None
    plain = isinstance(target, _torch.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags
    return plain and isinstance(written, fx.Node) and written in now and not is_view(written)


def is_sure_attention(node: fx.Node) -> bool:
    """Whether this is attention without dropout: torch marks all of it as random."""
    target: Any = node.target
    if "scaled_dot_product" not in str(target):
        return False
    place = next((i for i, each in enumerate(target._schema.arguments) if each.name == "dropout_p"), None)
    return place is not None and node.args[place : place + 1] in ((), (0.0,)) and not node.kwargs.get("dropout_p")


def layer_of(node: fx.Node) -> tuple[str, str]:
    """The phase, and the part of the module path up to its first number: one of several equal layers."""
    about: dict[str, str] = node.meta.get("argosy") or {}
    path = about.get("path", "")
    numbered = re.match(r".*?\.\d+(?=\.|$)", path)
    return about.get("phase", ""), numbered[0] if numbered else path.partition(".")[0]


def complete(region: Region) -> None:
    """Find what the region reads from outside, and what is read of it there."""
    inside = set(region.nodes)
    read = (each for node in region.nodes for each in node.all_input_nodes)
    region.inputs = [each for each in dict.fromkeys(read) if each not in inside]
    region.outputs = [node for node in region.nodes if any(user not in inside for user in node.users)]


def region_key(region: Region, module: fx.GraphModule) -> str:
    """Equal for regions that one piece of compiled code can serve."""
    shapes = [describe(each.meta["val"]) for each in (*region.inputs, *region.outputs)]
    text = f"{graph_text(module.graph)}\n{shapes}\n{torch.__version__} {torch.get_num_threads()}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def describe(value: Any) -> str:
    return f"{tuple(value.shape)} {tuple(value.stride())} {value.dtype} {value.device}"


def with_compiled(graph: fx.Graph, regions: Sequence[Region], functions: Sequence[Callable[..., Any]]) -> fx.Graph:
    """A graph that calls a function in the place of each region."""
    last = {region.nodes[-1]: index for index, region in enumerate(regions)}
    inside = {node for region in regions for node in region.nodes}
    made, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in inside:
            known[node] = made.node_copy(node, lambda n: known[n])
        elif node in last:
            region, function = regions[last[node]], functions[last[node]]
            results = made.call_function(function, tuple(known[each] for each in region.inputs))
            for index, each in enumerate(region.outputs):
                known[each] = made.call_function(_torch.getitem, (results, index))
                known[each].meta = dict(each.meta)
    return made
