"""Stack samples into a batch, as torch's default_collate does, but into memory that the caller provides."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from argosy.core import ConfigError
from argosy.transfer import to_host

Array = NDArray[Any]


class Empty(Protocol):
    """Makes the arrays of a batch: in the heap, or in memory that is shared with the loader."""

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array: ...


Collate = Callable[[list[Any]], Any]
_COLLATE = "give the loader a collate function"


def in_heap(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return np.empty(shape, dtype)


def stack(samples: Sequence[Any], empty: Empty = in_heap) -> Any:
    """Stack numbers, arrays and tensors, and the items of containers; return other samples as a list.

    Raises:
        ConfigError: arrays of different shapes, or containers of different keys or lengths.
    """
    first = samples[0]
    if _is_array(first):
        return _stack_arrays([_as_array(sample) for sample in samples], empty)
    if _is_tensor(first):
        import torch

        return torch.stack(cast("list[torch.Tensor]", list(samples)))
    if isinstance(first, bool | int | float | np.generic):
        values = np.asarray(samples)
        result = empty(values.shape, values.dtype)
        result[...] = values
        return result
    if isinstance(first, Mapping):
        keys = list(cast("Mapping[Any, Any]", first))
        if any(set(sample) != set(keys) for sample in samples):
            raise ConfigError("samples with different keys cannot be stacked", hint=_COLLATE)
        return {key: stack([sample[key] for sample in samples], empty) for key in keys}
    if isinstance(first, tuple | list):
        if any(len(sample) != len(samples[0]) for sample in samples):
            raise ConfigError("samples of different lengths cannot be stacked", hint=_COLLATE)
        rows = cast("Sequence[tuple[Any, ...]]", samples)
        return _rebuild(type(rows[0]), [stack(column, empty) for column in zip(*rows, strict=True)])
    return list(samples)


class BatchStack:
    """Stacks samples as they come: an array is copied into the batch while it is in the cache, and dropped.

    The result is that of `stack`. Keeping all samples until the end would cost as much as reading them, because the
    allocator would take their memory from the kernel and return it for every batch.
    """

    def __init__(self, count: int, empty: Empty) -> None:
        self._count, self._empty = count, empty
        self._target: Array | None = None
        self._parts: list[BatchStack] | None = None
        self._shape: Any = None
        """What all samples must have: a type and its keys or length, or the shape and type of an array."""
        self._kept: list[Any] = []
        self.taken = 0

    def add(self, sample: Any) -> None:
        """Add the next sample."""
        if self.taken == 0:
            self._begin(sample)
        if self._target is not None:
            array = _as_array(sample) if _is_array(sample) else None
            if array is None or (array.shape, array.dtype) != self._shape:
                self._give_up()
            else:
                self._target[self.taken] = array
        elif self._parts is not None and _form(sample) != self._shape:
            self._give_up()
        if self._parts is not None:
            for part, value in zip(self._parts, _values(sample), strict=True):
                part.add(value)
        elif self._target is None:
            self._kept.append(sample)
        self.taken += 1

    def _begin(self, sample: Any) -> None:
        if _is_array(sample):
            first = _as_array(sample)
            if first.shape and not first.dtype.hasobject:
                self._shape = first.shape, first.dtype
                self._target = self._empty((self._count, *first.shape), first.dtype)
        elif isinstance(sample, dict | tuple | list) and sample:
            self._shape = _form(sample)
            self._parts = [BatchStack(self._count, self._empty) for _ in _values(sample)]

    def _give_up(self) -> None:
        """This sample has another form: keep the samples as they are, and let `stack` report the error."""
        self._kept = self._samples()
        self._target = self._parts = None

    def _samples(self) -> list[Any]:
        if self._target is not None:
            return list(self._target[: self.taken])
        if self._parts is None:
            return self._kept
        rows = zip(*(part._samples() for part in self._parts), strict=True)
        return [_like(self._shape, list(row)) for row in rows]

    def finish(self) -> Any:
        """Return the batch.

        Raises:
            ConfigError: as `stack`.
        """
        if self._target is not None:
            return self._target[: self.taken]
        if self._parts is not None:
            return _like(self._shape, [part.finish() for part in self._parts])
        return stack(self._kept, self._empty)


def _form(sample: Any) -> Any:
    return type(sample), tuple(cast("dict[Any, Any]", sample)) if isinstance(sample, dict) else len(sample)


def _values(sample: Any) -> Any:
    return cast("dict[Any, Any]", sample).values() if isinstance(sample, dict) else sample


def _like(form: Any, values: list[Any]) -> Any:
    kind, keys = form
    return dict(zip(keys, values, strict=True)) if issubclass(kind, dict) else _rebuild(kind, values)


def _rebuild(kind: type[Any], values: list[Any]) -> Any:
    """Return the values as a list, or as a tuple of this kind."""
    if issubclass(kind, list):
        return values
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def _stack_arrays(arrays: list[Array], empty: Empty) -> Array:
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if any(array.shape != shape for array in arrays):
        shapes = sorted({array.shape for array in arrays})[:4]
        raise ConfigError(
            f"arrays of different shapes cannot be stacked: {', '.join(map(str, shapes))}",
            hint=f"pad them, {_COLLATE}, or pack sequences with Pack",
        )
    if dtype.hasobject:
        raise ConfigError(f"arrays of Python objects cannot be stacked: {dtype}")
    result = empty((len(arrays), *shape), np.result_type(*{array.dtype for array in arrays}))
    for place, array in zip(result, arrays, strict=True) if shape else ():
        place[...] = array
    if not shape:
        result[...] = arrays
    return result


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (_is_tensor(value) and numpy_knows(value))


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and hasattr(value, "untyped_storage")


def numpy_knows(tensor: Any) -> bool:
    """Whether a tensor can become an array: numpy has no bfloat16 and no sparse arrays."""
    return _has_array(tensor.dtype) and str(tensor.layout) == "torch.strided"


@cache
def _has_array(dtype: Any) -> bool:
    import torch

    try:
        torch.empty(0, dtype=dtype).numpy()
    except (TypeError, RuntimeError):
        return False
    return True


def _as_array(value: Any) -> Array:
    return cast(Array, value if isinstance(value, np.ndarray) else to_host(value.detach()).numpy())


def to_tensors(batch: Any, convert: Callable[[Array], Any]) -> Any:
    """Return the batch with every numeric array converted."""
    if isinstance(batch, np.ndarray):
        array = cast(Array, batch)
        return convert(array) if array.dtype.kind in "biufc" else array
    if isinstance(batch, dict):
        return {key: to_tensors(value, convert) for key, value in cast("dict[Any, Any]", batch).items()}
    if isinstance(batch, list | tuple):
        values = cast("Sequence[Any]", batch)
        return _rebuild(type(values), [to_tensors(value, convert) for value in values])
    return batch
