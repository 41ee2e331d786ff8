"""Python objects on a link: plain data by marshal, which costs half, everything else by pickle protocol 5.

Code goes through cloudpickle; arrays and tensors travel as buffers without a copy.
Only for links between processes of one user, whose credentials were checked before a byte was read.
"""

import io
import marshal
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from argosy.core import ConfigError

IN_BAND_MAX = 4096
"""Buffers up to this size are cheaper inside the pickle."""
_SCALARS = frozenset({int, float, str, bytes, bool, type(None)})
_CONTAINERS = frozenset({tuple, list, dict})
_PARTS_MAX = 10_000
_MARSHAL = 4
_PICKLE = 0x80
"""The first byte of every pickle; no marshalled value begins with it."""
_NO_BUFFERS: list[memoryview] = []
_CloudPickler: Any = cast(Any, cloudpickle).Pickler


class _Pickler(_CloudPickler):
    """Pickles functions and classes of `__main__` by value, and tensors as buffers."""

    def reducer_override(self, obj: Any) -> Any:
        torch = cast(Any, sys.modules.get("torch"))
        if torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter):
            reduced = _reduce_tensor(torch, obj)
            if reduced is not None:
                return reduced
        inherited: Any = super()
        return inherited.reducer_override(obj)


def dump(value: object, *, in_band: bool = False) -> tuple[bytes, list[memoryview]]:
    """Pickle a value; returns the pickle and its out-of-band buffers (none if `in_band`).

    Raises:
        ConfigError: some part cannot be pickled; the message names it and says why.
    """
    if type(value) in _SCALARS or _is_plain(value, 3):
        return marshal.dumps(cast(Any, value), _MARSHAL), _NO_BUFFERS
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True
        if in_band or raw.nbytes <= IN_BAND_MAX:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5, buffer_callback=keep).dump(value)
    except Exception as error:
        raise ConfigError(explain(value, error), hint="send plain data, or define __getstate__ without it") from None
    return file.getvalue(), buffers


def load(pickled: bytes | memoryview, buffers: Iterable[object] = ()) -> Any:
    """Unpickle the result of `dump`; arrays use the buffers as their memory."""
    if pickled[0] != _PICKLE:
        return marshal.loads(pickled)
    return pickle.loads(pickled, buffers=cast(Any, buffers)) if buffers else pickle.loads(pickled)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a value consists of scalars and small containers alone, without a user's class or an array."""
    kind = cast("type[object]", type(value))
    if kind in _SCALARS:
        return True
    if depth == 0 or kind not in _CONTAINERS or len(value) > 16:
        return False
    if not value:
        return True
    if kind is dict:
        value = (*value, *value.values())
    for item in value:  # noqa: SIM110 - all() is slower, and every call comes here.
        if type(item) not in _SCALARS and not _is_plain(item, depth - 1):
            return False
    return True


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    """Reduce a dense CPU tensor to one buffer; None for every other kind, which torch pickles itself."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj():
        return None
    plain = tensor.detach().contiguous().resolve_neg()
    raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
    buffer = pickle.PickleBuffer(raw)
    return _rebuild_tensor, (
        buffer,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.requires_grad,
        type(tensor) is not torch.Tensor,
    )


def _rebuild_tensor(buffer: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool, parameter: bool) -> Any:
    import torch

    untyped: Any = torch
    if memoryview(buffer).nbytes:
        if memoryview(buffer).readonly:
            buffer = bytearray(buffer)
        tensor = untyped.frombuffer(buffer, dtype=dtype).view(shape)
    else:
        tensor = untyped.empty(shape, dtype=dtype)
    if parameter:
        return untyped.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def explain(value: object, error: BaseException) -> str:
    """Name the innermost part that cannot be pickled, as the user would write it."""
    path, culprit, seen = "", value, set[int]()
    for _ in range(32):
        for name, part in _parts(culprit):
            if id(part) not in seen and (why := _refusal(part)) is not None:
                seen.add(id(part))
                path, culprit, error = path + name, part, why
                break
        else:
            break
    where = f" ({path.lstrip('.')})" if path else ""
    return f"cannot be sent to another process: {type(culprit).__name__}{where}: {error}"


def _refusal(part: object) -> BaseException | None:
    try:
        _Pickler(io.BytesIO(), protocol=5, buffer_callback=list[Any]().append).dump(part)
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        yield from ((f"[{key!r}]", part) for key, part in list(pairs.items())[:_PARTS_MAX])
        return
    if isinstance(value, list | tuple | set | frozenset):
        items = cast("Sequence[object]", value)
        yield from ((f"[{index}]", part) for index, part in enumerate(list(items)[:_PARTS_MAX]))
        return
    closure: Sequence[Any] = getattr(value, "__closure__", None) or ()
    names: Sequence[str] = getattr(getattr(value, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, closure, strict=False):
        yield f".{name}", cell.cell_contents
    if hasattr(value, "__dict__") and not isinstance(value, type):
        attributes = cast("dict[str, object]", vars(value))
        for name, part in list(attributes.items())[:_PARTS_MAX]:
            yield f".{name}", part
