"""Samples in, one batch out: as torch's default_collate, but arrays are written where they are wanted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from argosy.core import ConfigError

Array = NDArray[Any]


class Empty(Protocol):
    """Where the arrays of a batch are made: in the heap, or in memory that is shared with the loader."""

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array: ...


Collate = Callable[[list[Any]], Any]


def in_heap(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return np.empty(shape, dtype)


def stack(samples: Sequence[Any], empty: Empty = in_heap) -> Any:
    """Put samples of one shape together: numbers, arrays and tensors are stacked, containers entered, others listed.

    Raises:
        ConfigError: arrays of different shapes, or containers of different keys or lengths.
    """
    first = samples[0]
    if _is_array(first):
        return _stack_arrays([_as_array(sample) for sample in samples], empty)
    if isinstance(first, bool | int | float | np.generic):
        values = np.asarray(samples)
        result = empty(values.shape, values.dtype)
        result[...] = values
        return result
    if isinstance(first, Mapping):
        keys = list(cast("Mapping[Any, Any]", first))
        if any(set(sample) != set(keys) for sample in samples):
            raise ConfigError("samples with different keys cannot be put together: give the loader a collate function")
        return {key: stack([sample[key] for sample in samples], empty) for key in keys}
    if isinstance(first, tuple | list):
        if any(len(sample) != len(samples[0]) for sample in samples):
            raise ConfigError("samples of different lengths cannot be put together: give the loader a collate function")
        rows = cast("Sequence[tuple[Any, ...]]", samples)
        columns = [stack(column, empty) for column in zip(*rows, strict=True)]
        if isinstance(first, tuple):
            kind = cast("type[Any]", type(samples[0]))
            return kind(*columns) if hasattr(kind, "_fields") else kind(columns)
        return columns
    return list(samples)


def _stack_arrays(arrays: list[Array], empty: Empty) -> Array:
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if any(array.shape != shape for array in arrays):
        shapes = sorted({array.shape for array in arrays})[:4]
        raise ConfigError(
            f"arrays of different shapes cannot be stacked: {', '.join(map(str, shapes))}",
            hint="pad them, give the loader a collate function, or pack sequences with Pack",
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
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and hasattr(value, "untyped_storage")


def _as_array(value: Any) -> Array:
    return cast(Array, value if isinstance(value, np.ndarray) else value.detach().cpu().numpy())


def to_tensors(batch: Any, convert: Callable[[Array], Any]) -> Any:
    """Return the batch with every numeric array as a tensor that shares its memory."""
    if isinstance(batch, np.ndarray):
        array = cast(Array, batch)
        return convert(array) if array.dtype.kind in "biufc" else array
    if isinstance(batch, dict):
        return {key: to_tensors(value, convert) for key, value in cast("dict[Any, Any]", batch).items()}
    if isinstance(batch, list):
        return [to_tensors(value, convert) for value in cast("list[Any]", batch)]
    if isinstance(batch, tuple):
        parts = [to_tensors(value, convert) for value in cast("tuple[Any, ...]", batch)]
        kind = cast("type[Any]", type(cast(Any, batch)))
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return batch
