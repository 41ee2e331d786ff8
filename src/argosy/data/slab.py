"""Shared memory for batches: a worker writes arrays into a slab; the loader maps the slab and hands them out.

A slab is an anonymous memory file: without a name, nothing is left behind when its holders are killed.

B1  A slab is reused only when no array of its last batch is referenced any more.
"""

import math
import mmap
import os
import pickle
import weakref
from collections.abc import Callable
from io import BytesIO
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from argosy.data.collate import Array, numpy_knows

SLAB_BYTES = 1 << 33
"""The address range of a slab; only written pages use memory. Less where the address space is limited."""
SLAB_BYTES_MIN = 1 << 26
_ALIGN = 64


class SlabWriter:
    """The worker's end: allocates arrays in the slab one after another."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("argosy-batch", os.MFD_CLOEXEC)
        self._size = SLAB_BYTES
        os.ftruncate(self.fd, self._size)
        while True:
            try:
                self._map = mmap.mmap(self.fd, self._size)
                break
            except OSError:
                if self._size <= SLAB_BYTES_MIN:
                    os.close(self.fd)
                    raise
                self._size //= 4
        self._bytes: Array = np.frombuffer(self._map, np.uint8)
        self._address = self._bytes.ctypes.data
        self.used = 0

    def reset(self) -> None:
        self.used = 0

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an uninitialised array in the slab."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        start = self._take(size)
        return cast(Array, self._bytes[start : start + size].view(kind).reshape(shape))

    def _take(self, size: int) -> int:
        start = -(-self.used // _ALIGN) * _ALIGN
        if start + size > self._size:
            raise MemoryError(f"a batch holds at most {self._size} bytes on this machine")
        self.used = start + size
        return start

    def write(self, data: bytes) -> tuple[int, int]:
        """Write bytes into the slab; returns their offset and size."""
        start = self._take(len(data))
        self._map[start : start + len(data)] = data
        return start, len(data)

    def dump(self, batch: Any) -> tuple[bytes, list[tuple[int, int]]]:
        """Return the batch pickled without its arrays, and their places in the slab; other arrays are copied in."""
        places: list[tuple[int, int]] = []

        def keep(buffer: pickle.PickleBuffer) -> None:
            raw = np.frombuffer(buffer.raw(), np.uint8)
            start = raw.ctypes.data - self._address
            if not 0 <= start < self._size:
                start = self._take(raw.size)
                self._bytes[start : start + raw.size] = raw
            places.append((start, raw.size))

        file = BytesIO()
        _Pickler(file, protocol=5, buffer_callback=keep).dump(batch)
        return file.getvalue(), places


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors as arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__module__ == "torch" and type(obj).__name__ == "Tensor":
            import torch

            if obj.layout is not torch.strided or obj.device.type != "cpu" or obj.is_quantized:
                return NotImplemented
            plain = obj.detach().resolve_conj().resolve_neg().contiguous()
            if not numpy_knows(plain):  # As integers of the same size.
                alike = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[plain.itemsize]
                return _tensor, (plain.view(alike).numpy(), str(plain.dtype).removeprefix("torch."))
            return _tensor, (plain.numpy(), "")
        if isinstance(obj, np.ndarray) and not obj.flags.c_contiguous and not cast(Array, obj).dtype.hasobject:
            return np.ascontiguousarray(cast(Array, obj)).__reduce_ex__(5)
        return NotImplemented


def _tensor(array: Array, dtype: str) -> Any:
    import torch

    tensor = cast(Any, torch).from_numpy(array)
    return tensor.view(getattr(torch, dtype)) if dtype else tensor


class SlabReader:
    """The loader's end: keeps the slab mapped, and notices when it may be reused."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def load(self, content: bytes, places: list[tuple[int, int]], release: Callable[[], None]) -> Any:
        """Return the batch with its arrays in the slab; `release` is called when none is referenced any more (B1)."""
        end = max((start + size for start, size in places), default=0)
        if not end:
            release()
            return pickle.loads(content)
        if self._map is None or len(self._map) < end:
            self._map = mmap.mmap(self._fd, 1 << max(end - 1, 1).bit_length())
        # All arrays of the batch refer to this one, which is freed with the last of them.
        whole: Array = np.frombuffer(self._map, np.uint8, end)
        weakref.finalize(whole, release).atexit = False
        view = memoryview(cast(Any, whole))
        if not content:
            start, size = places.pop()
            content = bytes(view[start : start + size])
        return pickle.loads(content, buffers=[view[start : start + size] for start, size in places])

    def close(self) -> None:
        """Close the slab; arrays that are still referenced stay valid."""
        os.close(self._fd)
        self._map = None
