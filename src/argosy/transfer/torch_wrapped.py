"""Tensors that consist of others and have no memory of their own, as those of 8-bit optimizers."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from argosy.core import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN = (Tensor, nn.Parameter)
BOOK = "qmap"
"""What torchao calls the table of what its codes mean; each rank has all of it."""
BLOCKED = ("codes", "scale")
"""Parts that may have one value for several cells: packed codes, and scales."""


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor. Their module takes seconds to import: where nobody has done that, there is none."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def opened(tensor: Tensor) -> dict[str, Tensor] | None:
    """The tensors that a tensor consists of; None: it is one by itself."""
    if type(tensor) in PLAIN or is_dtensor(tensor) or not is_traceable_wrapper_subclass(tensor):
        return None
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def bare(tensor: Tensor) -> Tensor:
    """The tensor inside of wrappers that add nothing but behaviour: it has the same shape and dtype."""
    while (inner := opened(tensor)) is not None:
        only = next(iter(inner.values())) if len(inner) == 1 else None
        if only is None or only.shape != tensor.shape or only.dtype != tensor.dtype:
            return tensor
        tensor = only
    return tensor


def is_short(tensor: Tensor) -> bool:
    """Whether cells of a tensor are nowhere: its memory was freed, or it never had any."""
    size = tensor.nbytes
    if not size:
        return False
    if tensor.untyped_storage().nbytes() >= size:
        return tensor.data_ptr() == 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.untyped_storage().nbytes() < (tensor.storage_offset() + last + 1) * tensor.element_size())


def blocks_in(inner: Mapping[str, Tensor], cells: int) -> dict[str, int]:
    """How many cells go with one value of a wrapped tensor's parts, where it is more than one."""
    sizes = {name: cells // inner[name].numel() for name in BLOCKED if name in inner and inner[name].numel()}
    return {name: size for name, size in sizes.items() if size > 1 and size * inner[name].numel() == cells}


def noted(name: str, tensor: Any) -> dict[str, Any]:
    """What is stored of a wrapped tensor besides its parts."""
    names, context = tensor.__tensor_flatten__()
    kind = type(tensor)
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "parts": list(names),
        "blocks": blocks_in({each: getattr(tensor, each) for each in names}, tensor.numel()),
        "context": _said(name, context, tuple(tensor.shape)),
    }


def _said(name: str, value: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Of what kind a value is, and what it says, as JSON can."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list) and shape and tuple(value) == shape:
        return {"shape": type(value).__name__}
    if isinstance(value, tuple | list):
        return {"list" if isinstance(value, list) else "tuple": [_said(name, each, shape) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _said(name, each, shape) for key, each in value.items()}}
    if isinstance(value, float):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | str):
        return {"value": value}
    raise ConfigError(f"{name} cannot be kept: a {type(value).__name__} belongs to it")


def rebuilt(name: str, note: Mapping[str, Any], parts: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """Such a tensor of these parts. Its class is only looked for among those that are imported already."""
    module, _, path = str(note["class"]).partition(":")
    kind: Any = sys.modules.get(module)
    for each in path.split("."):
        kind = getattr(kind, each, None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise ConfigError(f"{name} was stored as a {path} of {module}, which is not imported here")
    context = _meant(note["context"], shape)
    stride = torch.empty(shape, device="meta").stride()
    return kind.__tensor_unflatten__(parts, context, shape, stride)  # type: ignore[attr-defined]


def _meant(said: Mapping[str, Any], shape: torch.Size) -> Any:
    ((kind, value),) = said.items()
    match kind:
        case "dtype":
            found = getattr(torch, value, None)
            if not isinstance(found, torch.dtype):
                raise ConfigError(f"no dtype of torch: {value!r}")
            return found
        case "shape":
            return list(shape) if value == "list" else tuple(shape) if value == "tuple" else shape
        case "list" | "tuple":
            items = [_meant(each, shape) for each in value]
            return items if kind == "list" else tuple(items)
        case "dict":
            return {key: _meant(each, shape) for key, each in value.items()}
        case _:
            return float(value) if kind == "float" else value
