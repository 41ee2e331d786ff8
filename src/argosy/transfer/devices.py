"""All that touches an accelerator, over `torch.accelerator`; the CPU is one case of it.

D1  The device of the tensors decides, not what the machine has: a model on the CPU initialises no accelerator.
D2  Work on a device is done when an event or a synchronisation says so, and an error may arrive only then.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from argosy.core import ArgosyError

if TYPE_CHECKING:
    import torch


def _torch() -> Any:
    """Torch: a caller that has tensors has imported it."""
    return cast(Any, sys.modules["torch"])


def device_of(tensors: "Iterable[torch.Tensor]") -> "torch.device | None":
    """The accelerator on which tensors are (D1); None if all are on the CPU."""
    return next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)


def to_host(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor, or a copy of it in the memory of the CPU, once the work queued before is done."""
    return tensor if tensor.is_cpu else tensor.cpu()


def synchronize_stream(device: "torch.device") -> None:
    """Wait for what this thread has queued on its current stream."""
    _torch().accelerator.current_stream(device).synchronize()


def synchronize(device: "torch.device | None") -> None:
    """Wait for all work on a device; nothing to do for the CPU.

    Raises:
        DeviceFailed: some of that work failed; the device is of no more use to this process.
    """
    if device is None:
        return
    with reported(device):
        _torch().accelerator.synchronize(device)


@contextmanager
def reported(device: "torch.device") -> Generator[None]:
    """Turn an error of a device, which may be that of earlier work, into DeviceFailed; lack of memory stays as it is.

    Raises:
        DeviceFailed: torch raised an error.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, _torch().OutOfMemoryError):
            raise
        raise DeviceFailed(str(device), str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def is_device_error(error: BaseException | None) -> bool:
    """Whether an accelerator's own error ended what raised this; lack of memory is not one."""
    kind = getattr(sys.modules.get("torch"), "AcceleratorError", DeviceFailed)
    while error is not None:
        if isinstance(error, DeviceFailed | kind):
            return True
        error = error.__cause__
    return False


class DeviceFailed(ArgosyError):
    """An accelerator reported an error: this process cannot use it any more."""

    def __init__(self, device: str, cause: str) -> None:
        super().__init__(device, cause)
        self.device, self.cause = device, cause

    def __str__(self) -> str:
        return f"device {self.device} failed: {self.cause}"


class HostCopies:
    """Copies of tensors of one device in pinned memory, made on a side stream while the device works on.

    D3  The copies are of what the tensors hold once the work queued so far is done. Who changes the tensors calls
        `fence` before: the device then waits for the copies, the process does not.
    """

    def __init__(self, tensors: "Sequence[torch.Tensor]", memory: "PinnedMemory") -> None:
        torch = _torch()
        self.device = tensors[0].device
        self._sources, self._memory = list(tensors), memory
        self._versions = [tensor._version for tensor in tensors]
        self.copies: list[Any] = []
        with reported(self.device):
            current, side = torch.accelerator.current_stream(self.device), memory.stream(self.device)
            side.wait_stream(current)
            with side:
                for tensor in tensors:
                    self.copies.append(memory.take(tensor))
                    self.copies[-1].copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.Event(self.device)
            self._copied.record(side)

    def fence(self) -> None:
        """Have this thread's stream wait for the copies."""
        with reported(self.device):
            _torch().accelerator.current_stream(self.device).wait_event(self._copied)

    def written_to(self) -> list[int]:
        """Which tensors, by their places, torch has counted a write to since the copies were begun."""
        pairs = enumerate(zip(self._sources, self._versions, strict=False))
        return [place for place, (tensor, version) in pairs if tensor._version != version]

    def wait(self) -> None:
        """Wait until the copies are there.

        Raises:
            DeviceFailed: they will never be.
        """
        with reported(self.device):
            self._copied.synchronize()

    def give_back(self) -> None:
        """The copies are not read any more: their memory is used again."""
        self._memory.give_back(self.copies)
        self.copies, self._sources = [], []


class PinnedMemory:
    """Pinned memory that is used again and again, since making it is slow; and a side stream for each device."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._streams: dict[torch.device, Any] = {}

    def stream(self, device: "torch.device") -> Any:
        if device not in self._streams:
            self._streams[device] = _torch().Stream(device)
        return self._streams[device]

    def take(self, like: "torch.Tensor") -> "torch.Tensor":
        """Contiguous memory for the cells of a tensor."""
        free = self._free.get((like.shape, like.dtype))
        if free:
            return free.pop()
        return _torch().empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def give_back(self, tensors: "Iterable[torch.Tensor]") -> None:
        for tensor in tensors:
            self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)


def pinned(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor in pinned memory, if a device of this process is in use: copies to it then need not be waited for."""
    return tensor.pin_memory() if _in_use() is not None else tensor


def seed_devices(word: int) -> None:
    """Seed the generators of the accelerators of this process, if one is in use."""
    module = _in_use()
    if module is not None:
        for generator in module.default_generators:
            generator.manual_seed(word)


def _in_use() -> Any:
    """Torch's module for the accelerator, if this process has initialised it (D1)."""
    torch = cast(Any, sys.modules.get("torch"))
    if torch is None or (accelerator := torch.accelerator.current_accelerator()) is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if module.is_initialized() else None
