"""Count the floating-point operations of a model's forward pass on fake tensors, off the training thread.

The model is copied with fake parameters: the live one is only read. Causal attention is counted in full.

F1  Nothing is computed on a device, and no memory is taken but Python objects.
F2  Whatever fails leaves no record and disturbs nothing.
"""

import copy
import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from argosy.observe.rank_journal import rank_journal

AFTER_STEPS = 5
AFTER_S = 5.0
"""Training is not disturbed before it has warmed up."""
TRAINERS = ("_trainer", "_fabric")
"""Attributes of a LightningModule."""


def count_flops(torch: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the operations of `model(*args, **kwargs)`; multiply and add count as two.

    Tensors in the arguments may be real: only their shapes are used.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            formula = flop_registry.get(func._overloadpacket)
            if formula is not None:
                Counter.total += formula(*args, **(kwargs or {}), out_val=result)
            return result

    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def imitate(tensor: Any) -> Any:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    class Imitating(TorchFunctionMode):
        """In a deep copy every tensor becomes one of the same shape: parameters, buffers, and those in attributes."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.Tensor.__deepcopy__:
                return func(*args, **(kwargs or {}))
            tensor, memo = args
            if id(tensor) not in memo:
                found = imitate(tensor)
                parameter = isinstance(tensor, torch.nn.Parameter)
                memo[id(tensor)] = torch.nn.Parameter(found, requires_grad=False) if parameter else found
            return memo[id(tensor)]

    with fake, torch.no_grad():
        # What trains the model is no part of it: a copy would be one of the training data too.
        memo = {id(owner): None for name in TRAINERS if (owner := getattr(model, name, None)) is not None}
        with Imitating():
            twin = copy.deepcopy(model, memo)
        args, kwargs = tree_map_only(torch.Tensor, imitate, (args, kwargs))
        with Counter():
            twin(*args, **kwargs)
    return Counter.total


def describe_batch(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """How many samples, and if the input is integers of two dimensions, tokens a forward pass takes."""
    named: Any = kwargs.get("input_ids")
    tensors: list[Any] = [
        each for each in (named, *args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim()
    ]
    if not tensors:
        return {}
    first = tensors[0]
    found = {"samples": int(first.shape[0])}
    if first.dim() == 2 and not first.is_floating_point() and not first.is_complex():
        found["tokens"] = first.numel()
    return found


class FlopWatch:
    """Counts the model of this process once, when it has trained for a while."""

    def __init__(self) -> None:
        self.thread_id = 0
        """The thread that counts: hooks ignore it."""
        self.done = False
        self._begun_at: float | None = None

    def reset(self) -> None:
        self.__init__()

    def see(self, torch: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int) -> None:
        """Look at an outermost forward pass of training."""
        if self.done:
            return
        now = time.monotonic()
        self._begun_at = now if self._begun_at is None else self._begun_at
        if steps < AFTER_STEPS or now - self._begun_at < AFTER_S:
            return
        self.done = True
        with suppress(Exception):
            from torch.utils._pytree import tree_map_only

            def hollow(tensor: Any) -> Any:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

            module = getattr(model, "_orig_mod", model)  # Of torch.compile.
            module = getattr(module, "module", module)  # Of DDP.
            facts: dict[str, Any] = describe_batch(torch, args, kwargs)
            first = next(module.parameters())
            facts |= {"parameters": sum(each.numel() for each in module.parameters()), "device": first.device.type}
            autocast = torch.is_autocast_enabled(first.device.type)
            dtype = torch.get_autocast_dtype(first.device.type) if autocast else first.dtype
            facts |= {"dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
            if first.device.type == "cuda":
                facts["device_name"] = torch.cuda.get_device_name(first.device)
            rank_journal.write("model", **facts)
            if os.environ.get("RANK", "0") == "0":
                shapes = tree_map_only(torch.Tensor, hollow, (args, kwargs))
                work = (torch, weakref.ref(module), shapes, first.device)
                threading.Thread(target=self._count, args=work, name="argosy-flops", daemon=True).start()

    def _count(self, torch: Any, model: Any, shapes: Any, device: Any) -> None:
        self.thread_id = threading.get_ident()
        with suppress(Exception):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        with suppress(Exception):  # F2
            from torch._subclasses.fake_tensor import FakeTensorMode
            from torch.utils._pytree import tree_map_only

            living = model()
            began = time.monotonic()
            with FakeTensorMode():
                args, kwargs = tree_map_only(
                    torch.Tensor,
                    lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device),
                    shapes,
                )
            forward = count_flops(torch, living, args, kwargs)
            rank_journal.write("flops", forward=forward, source="counted", took_s=time.monotonic() - began)
        self.thread_id = 0
