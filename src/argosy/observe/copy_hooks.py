"""Record copies between devices. Installed when a model on an accelerator is first called, so the CPU pays nothing."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from argosy.observe.dynamo_skip import skip_dynamo
from argosy.observe.spans import ring

METHODS = ("to", "cuda", "cpu", "copy_")


def patch_copies(torch: Any, model: Any) -> None:
    """Patch the methods of tensors that copy, if the model is not on the CPU."""
    first = next(iter(model.parameters()), None)
    if first is None or first.device.type == "cpu" or hasattr(torch.Tensor.to, "__wrapped__"):
        return
    for name in METHODS:
        original = getattr(torch.Tensor, name, None)
        if original is not None:
            setattr(torch.Tensor, name, _recorded(torch, original, name))


def target_of(torch: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The type of the device that a call names; "" if it names none."""
    if name in ("cuda", "cpu"):
        return name
    target: Any = args[0] if args else kwargs.get("src" if name == "copy_" else "device", kwargs.get("other"))
    if isinstance(target, torch.Tensor):
        target = target.device
    if isinstance(target, torch.device):
        return target.type
    return target.partition(":")[0] if isinstance(target, str) else ""


def _recorded(torch: Any, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    compiling = torch.compiler.is_compiling

    @wraps(original)
    def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling() or target_of(torch, name, args, kwargs) in ("", tensor.device.type):
            return original(tensor, *args, **kwargs)
        records = ring()
        records.begin("copy")
        try:
            return original(tensor, *args, **kwargs)
        finally:
            records.end("copy")

    skip_dynamo(torch, copy)
    return copy
