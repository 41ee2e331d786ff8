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
from argosy.transfer.blocks import Blocks
from argosy.transfer.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN = (Tensor, nn.Parameter)
BOOK = "qmap"


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


def check_cut(name: str, inner: Mapping[str, Tensor], layout: Layout) -> None:
    """See to it that each rank has such a tensor: optimizers keep a part as plain numbers that is no whole blocks.

    Raises:
        ConfigError: one has no whole blocks.
    """
    codes, scales = inner.get("codes"), inner.get("scale")
    if codes is None or scales is None or not scales.numel():
        return
    for rank in layout.ranks:
        cells = sum(piece.box.cells for piece in layout.held.get(rank, ()))
        size = max(1, codes.numel() // scales.numel())
        if cells % size:
            raise ConfigError(
                f"{name} cannot be kept: it is in blocks of {size} cells here, and rank {rank} has {cells} cells",
                hint="choose ranks or sizes of layers so that each rank has whole blocks",
            )


def blocks_in(key: str, inner: Mapping[str, Tensor], cells: int) -> dict[str, Blocks]:
    """Which of a wrapped tensor's parts have a value for several cells each: `codes` of less than a byte, `scale`."""
    found: dict[str, Blocks] = {}
    codes, scales = inner.get("codes"), inner.get("scale")
    if codes is None or scales is None or scales.dim() != 1:
        return found
    if packed := codes.numel() != cells:
        found["codes"] = Blocks(max(1, cells // max(1, codes.numel())))
    size = max(1, cells // max(1, scales.numel()))
    found["scale"] = Blocks(size) if packed else Blocks(size, f"{key}.codes", f"{key}.{BOOK}" if BOOK in inner else "")
    return found


def noted(name: str, tensor: Any) -> dict[str, Any]:
    """What is stored of a wrapped tensor besides its parts.

    Raises:
        ConfigError: it consists of more than JSON can say.
    """
    names, context = tensor.__tensor_flatten__()
    kind = type(tensor)
    said = _said(name, context, tuple(tensor.shape))
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "parts": list(names), "context": said}


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
    """Such a tensor of these parts. Its class is only looked for among those that are imported already.

    Raises:
        ConfigError: it is not there.
    """
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
