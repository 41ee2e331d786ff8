"""Turn a captured step into a trace that the cost model can price: work, bytes, lifetimes, dependencies."""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from argosy.cost import Collective, Op, Trace
from argosy.graph import _torch
from argosy.graph.step_capture import StepGraph
from argosy.kernels import LINEAR_CROSS_ENTROPY

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
}


def lower(step: StepGraph, *, fused_optimizer: bool = True) -> Trace:
    """Price-relevant facts of every operation, in program order; the optimizer's update follows if it was captured."""
    nodes = list(step.graph.nodes)
    place: dict[fx.Node, int] = {}
    ops: list[Op] = []
    dims = {name: dim for dim, name in step.groups.items()}
    for node in nodes:
        if node.op == "call_function":
            place[node] = len(ops)
            ops.append(op_of(node, place, dims))
    ops = with_lifetimes(ops, nodes, place)
    resident = resident_bytes(step, nodes)
    if step.optimizer is not None:
        state, update = optimizer_ops(step.optimizer, len(ops), fused=fused_optimizer)
        resident["optimizer"] = max(0.0, state - 2 * resident.get("parameter", 0.0))
        ops += update
    return Trace(tuple(ops), resident, step.layers_captured)


def op_of(node: fx.Node, place: dict[fx.Node, int], dims: dict[str, str]) -> Op:
    about: dict[str, str] = node.meta.get("argosy") or {}
    target: Any = node.target
    namespace, name = getattr(target, "namespace", ""), str(getattr(target, "_opname", getattr(target, "__name__", "")))
    op = Op(
        name=name,
        kind="view",
        phase=about.get("phase", "backward"),
        needs=tuple(sorted({place[each] for each in node.all_input_nodes if each in place})),
        path=about.get("path", ""),
        line=about.get("line", ""),
    )
    if namespace in ("_c10d_functional", "bucketing") and name in COLLECTIVES:
        kind = COLLECTIVES[name]
        payload = sum(nbytes(each) for each in tensors(node.meta.get("val")))
        if kind == "reduce_scatter":
            payload = sum(nbytes(each) for a in node.all_input_nodes for each in tensors(a.meta.get("val")))
        dim = next((dims[each] for each in node.args if isinstance(each, str) and each in dims), "fsdp")
        return replace(op, kind="collective", collective=Collective(kind, dim, payload))
    if is_view(node):
        return op
    return replace(op, **work_of(node))


def work_of(node: fx.Node) -> dict[str, Any]:
    results = tensors(node.meta.get("val"))
    inputs = [each for a in node.all_input_nodes for each in tensors(a.meta.get("val"))]
    moved = sum(nbytes(each) for each in (*results, *inputs))
    kinds = [DTYPE_NAMES[each.dtype] for each in (*inputs, *results) if each.dtype in DTYPE_NAMES]
    dtype = kinds[0] if kinds else "fp32"
    flops = flops_of(node)
    name = str(node.target)
    kind = "attention" if "attention" in name else "matmul" if flops else "memory"
    return {"kind": kind, "flops": flops, "bytes": float(moved), "dtype": dtype}


def flops_of(node: fx.Node) -> float:
    """Operations by torch's own formulas; none for what it does not count."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    formula = _torch.flop_registry.get(packet)
    values: Any = map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    args, kwargs = values
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=node.meta["val"]))
    name = str(getattr(packet, "__name__", ""))
    if name == LINEAR_CROSS_ENTROPY.name:
        return LINEAR_CROSS_ENTROPY.cost(*args)[0]
    if "flash_attention_for_cpu" in name:
        shift = 1 if "backward" in name else 0
        q, k = args[shift], args[shift + 1]
        return 4.0 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3] * (2.5 if shift else 1.0)
    return 0.0


def is_view(node: fx.Node) -> bool:
    """Whether the operation makes no new bytes and reads none: views, indexing of tuples, waits."""
    target: Any = node.target
    if not isinstance(target, _torch.OpOverload):
        return True
    if target.namespace == "_c10d_functional":
        return True
    if target.is_view or target._opname in ("_unsafe_view", "detach", "alias"):
        return True
    fresh = storages(node.meta.get("val"))
    read = {key for a in node.all_input_nodes for key in storages(a.meta.get("val"))}
    return bool(fresh) and fresh <= read and not target._schema.is_mutable


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for item in value for each in tensors(item)] if isinstance(value, list | tuple) else []


def nbytes(value: Tensor) -> int:
    """Bytes that an operation moves: those of the elements, or of the storage where elements repeat."""
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def storages(value: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tensors(value)}


def with_lifetimes(ops: list[Op], nodes: list[fx.Node], place: dict[fx.Node, int]) -> list[Op]:
    """Note where each storage begins and what reads it last. A wait hands on the storage that it waits for."""
    owner: dict[int, int] = {}
    size: dict[int, float] = {}
    root: dict[int, int] = {}
    last: dict[int, int] = {}
    kept: set[int] = set()
    for node in nodes:
        keys = storages(node.meta.get("val"))
        read = {root.get(key, key) for a in node.all_input_nodes for key in storages(a.meta.get("val"))}
        if node.op == "placeholder":
            kept |= keys
        elif node.op == "output":
            kept |= read
        elif node in place:
            if "wait_tensor" in str(node.target):
                root |= dict.fromkeys(keys - read, next(iter(read)))
            for value in tensors(node.meta.get("val")):
                key = value.untyped_storage()._cdata
                if key not in owner and key not in kept and key not in root:
                    owner[key], size[key] = place[node], float(value.untyped_storage().nbytes())
            for key in read | {root.get(key, key) for key in keys}:
                last[key] = place[node]
    allocates, frees = defaultdict[int, float](float), defaultdict[int, float](float)
    holds: dict[int, str] = {}
    first_backward = next((i for i, op in enumerate(ops) if op.phase == "backward"), len(ops))
    for key, index in owner.items():
        allocates[index] += size[key]
        if key not in kept:
            frees[last.get(key, index)] += size[key]
        end = len(ops) if key in kept else last.get(key, index)
        gathered = ops[index].collective is not None and ops[index].name.startswith("all_gather")
        crosses = index < first_backward <= end
        other = "gradient" if key in kept else "activation" if crosses else "temporary"
        holds[index] = "gathered" if gathered else other
    return [replace(op, allocates=allocates[i], frees=frees[i], holds=holds.get(i, "")) for i, op in enumerate(ops)]


def resident_bytes(step: StepGraph, nodes: list[fx.Node]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, node in zip(step.inputs, (n for n in nodes if n.op == "placeholder"), strict=True):
        found[name.partition(":")[0]] += node.meta["val"].untyped_storage().nbytes()
    return dict(found)


def optimizer_ops(update: fx.GraphModule, first: int, *, fused: bool) -> tuple[float, list[Op]]:
    """The bytes that an update reads, and its operations: one over all tensors if it is fused."""
    holders = [node for node in update.graph.nodes if node.op == "placeholder"]
    whole = float(sum(node.meta["val"].untyped_storage().nbytes() for node in holders))
    if fused:
        return whole, [Op("update", "memory", "optimizer", bytes=2 * whole, dtype="fp32")]
    place: dict[fx.Node, int] = {}
    ops: list[Op] = []
    for node in update.graph.nodes:
        if node.op == "call_function":
            place[node] = first + len(ops)
            ops.append(replace(op_of(node, place, {}), phase="optimizer"))
    return whole, ops
