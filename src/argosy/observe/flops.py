"""Count on fake tensors, off the training thread, what a training step of a model takes: operations and memory.

The model is copied with fake parameters: the live one is only read. Causal attention is counted in full.

F1  Nothing is computed on a device, and no memory is taken but Python objects.
F2  Whatever fails disturbs nothing; the reason is recorded.
F3  A process that ends stops the count first: torch must not run beside the end of the interpreter.
"""

import atexit
import copy
import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

from argosy.observe.rank_journal import rank_journal

END_S = 20.0
"""How long the end of the process waits for the thread that counts."""
_ending = threading.Event()
AFTER_STEPS = 5
AFTER_S = 5.0
ERROR_MAX = 500
"""Training is not disturbed before it has warmed up."""
TRAINERS = ("_trainer", "_fabric")
"""Attributes of a LightningModule."""


class StepCount(NamedTuple):
    """Multiply and add count as two operations."""

    forward: int
    executed: int
    """Forward and backward as they run, with what is computed again; 0 if the backward pass cannot be imitated."""
    activation_bytes: int
    """What the forward pass keeps for the backward pass, besides parameters."""


def count_step(torch: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCount:
    """Count `model(*args, **kwargs)` and its backward pass.

    Tensors in the arguments may be real: only their shapes are used.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            _stop_if_ending()
            result = func(*args, **(kwargs or {}))
            if (formula := flop_registry.get(func._overloadpacket)) is not None:
                Counter.total += formula(*args, **(kwargs or {}), out_val=result)
            return result

    def imitate(tensor: Any) -> Any:
        _stop_if_ending()
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
                memo[id(tensor)] = torch.nn.Parameter(found, requires_grad=tensor.requires_grad) if parameter else found
            return memo[id(tensor)]

    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        # What trains the model is no part of it: a copy would be one of the training data too.
        memo = {id(owner): None for name in TRAINERS if (owner := getattr(model, name, None)) is not None}
        with Imitating():
            twin = copy.deepcopy(model, memo)
        own = {each.untyped_storage()._cdata for each in (*twin.parameters(), *twin.buffers())}
        args, kwargs = tree_map_only(torch.Tensor, imitate, (args, kwargs))
        with Counter():
            with torch.autograd.graph.saved_tensors_hooks(keep, _itself):
                result = twin(*args, **kwargs)
            forward = Counter.total
            with suppress(Exception):
                made = [each.sum() for each in tree_leaves(_values(result)) if _differentiable(torch, each)]
                torch.stack(made).sum().backward()
    executed = Counter.total if Counter.total > forward else 0
    return StepCount(forward, executed, sum(each.nbytes() for key, each in kept.items() if key not in own))


def _stop_if_ending() -> None:
    if _ending.is_set():
        raise RuntimeError("the process ends")


def _end(thread: threading.Thread) -> None:
    """F3."""
    _ending.set()
    thread.join(END_S)


def _itself(tensor: Any) -> Any:
    return tensor


def _values(result: Any) -> Any:
    """The outputs of a model of transformers are an object that is also a mapping."""
    return dict(result) if hasattr(result, "items") else result


def _differentiable(torch: Any, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def bytes_by_role(parameters: Any, state: Any) -> dict[str, int]:
    """What parameters, their gradients and the optimizer's moments take on this rank."""

    def size(tensor: Any) -> int:
        mine = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return int(mine.nbytes)

    parameters = list(parameters)
    moments = [value for each in state.values() for value in each.values() if hasattr(value, "nbytes")]
    return {
        "parameter_bytes": sum(size(each) for each in parameters),
        "gradient_bytes": sum(size(each.grad) for each in parameters if each.grad is not None),
        "moment_bytes": sum(size(each) for each in moments),
    }


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
        self.weighs = False
        """Whether the next optimizer step is to be weighed."""
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
        self.done = self.weighs = True
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
                thread = threading.Thread(target=self._count, args=work, name="argosy-flops", daemon=True)
                atexit.register(_end, thread)
                thread.start()

    def weigh(self, torch: Any, optimizer: Any) -> None:
        """After a step of an optimizer: record what its parameters, gradients and moments take, and device memory."""
        self.weighs = False
        with suppress(Exception):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            found = bytes_by_role(parameters, optimizer.state)
            device = parameters[0].device
            if device.type != "cpu":
                memory = torch.get_device_module(device)
                found |= {
                    "peak_bytes": int(memory.max_memory_allocated(device)),
                    "cache_bytes": int(memory.memory_reserved(device) - memory.memory_allocated(device)),
                }
            rank_journal.write("memory", **found)

    def _count(self, torch: Any, model: Any, shapes: Any, device: Any) -> None:
        self.thread_id = threading.get_ident()
        # At usual priority: a thread of low priority would wait for a core with the GIL, and training for it.
        try:  # F2
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
            found = count_step(torch, living, args, kwargs)
            rank_journal.write("flops", **found._asdict(), source="counted", took_s=time.monotonic() - began)
        except Exception as error:
            rank_journal.write("flops_failed", error=f"{type(error).__name__}: {error}"[:ERROR_MAX])
        self.thread_id = 0
