"""What each operation of torch moves between ranks, and what it answers when there are no peers to ask.

A plan knows three ways to be carried out: through our engine (`prepare` says which bytes go where), through
Gloo, or locally (`answer`), as if the peers held the same tensors: that is how constructors run before a
newcomer has joined, and how a step goes on to its vote after a loss.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from argosy.collective.arguments import REDUCTIONS, check_one_per_rank, check_root, reduction_options
from argosy.collective.wire import REDUCIBLE, Kind, Wish, dtype_code

Tensor = torch.Tensor
Part = tuple[int, int]
NOTHING: Part = (0, 0)

_SUM, _AVERAGE, _PRODUCT, _MINIMUM, _MAXIMUM, _AND, _OR, _XOR = range(8)
_OF_BOOLEANS = {_SUM: _OR, _MAXIMUM: _OR, _OR: _OR, _PRODUCT: _AND, _MINIMUM: _AND, _AND: _AND, _XOR: _XOR}


class Step:
    """One call of the engine, the tensors it must keep alive, and what follows it."""

    def __init__(self, wish: Wish, sends: Sequence[Part], receives: Sequence[Part], memory: "Memory") -> None:
        self.wish, self.sends, self.receives, self._memory = wish, sends, receives, memory

    def finish(self) -> None:
        self._memory.write_back()


class Plan:
    """One operation as torch asked for it."""

    def __init__(self, name: str, tensors: Sequence[Tensor], gloo: tuple[str, tuple[Any, ...]]) -> None:
        self.name, self.tensors, self.gloo = name, tensors, gloo
        self.prepare: Callable[[], list[Step]] = list
        self.answer: Callable[[], None] = lambda: None
        self.after: Callable[[], object] = lambda: None
        self.result: list[Tensor] = list(tensors)


class Memory:
    """The memory behind tensors; those that are not contiguous get a copy that is written back."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._back: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Part:
        flat = tensor.detach().contiguous()
        self._kept.append(flat)
        return flat.data_ptr(), flat.numel() * flat.element_size()

    def write(self, tensor: Tensor) -> Part:
        """A part that the engine fills; what it held before is there too."""
        plain = tensor.detach()
        part = self.read(plain)
        if not plain.is_contiguous():
            self._back.append((plain, self._kept[-1]))
        return part

    def write_back(self) -> None:
        for tensor, flat in self._back:
            tensor.copy_(flat)
        self._back.clear()


def arithmetic(tensor: Tensor, reduction: int) -> tuple[int, int]:
    """Return element type and reduction as the engine knows them.

    Raises:
        RuntimeError: there is no such reduction of such elements, as Gloo says too.
    """
    if tensor.dtype == torch.bool and reduction in _OF_BOOLEANS:
        return dtype_code(torch.uint8), _OF_BOOLEANS[reduction]
    dtype = tensor.dtype
    if dtype.is_complex and reduction in (_SUM, _AVERAGE):
        dtype = torch.float32 if dtype == torch.complex64 else torch.float64
    if dtype not in REDUCIBLE:
        raise RuntimeError(f"Invalid scalar type for a reduction: {tensor.dtype}")
    fits = reduction <= _MAXIMUM if dtype.is_floating_point else reduction <= _XOR and reduction != _AVERAGE
    if not fits:
        raise RuntimeError(f"Cannot use this reduction with {tensor.dtype}: {REDUCTIONS[reduction]}")
    return dtype_code(dtype), reduction


def shares(part: Part, size: int) -> list[Part]:
    """Cut a part into `size` equal ones."""
    step = part[1] // size
    return [(part[0] + index * step, step) for index in range(size)]


def all_reduce(name: str, tensors: Sequence[Tensor], reduction: int, gloo: tuple[str, tuple[Any, ...]]) -> Plan:
    plan = Plan(name, tensors, gloo)
    kinds = [arithmetic(tensor, reduction) for tensor in tensors if not tensor.is_sparse]

    def prepare() -> list[Step]:
        steps: list[Step] = []
        for tensor, (element, operation) in zip(tensors, kinds, strict=True):
            memory = Memory()
            part = memory.write(tensor)
            steps.append(Step(Wish(Kind.ALL_REDUCE, name, element, operation), [part], [part], memory))
        return steps

    plan.prepare = prepare
    return plan


class Ballot:
    """The words of votes, in memory that the engine reads and writes: the smallest of each."""

    def __init__(self, count: int) -> None:
        self._words = torch.empty(count, dtype=torch.int64)
        self.words = self._words.numpy()
        self.part: Part = (self._words.data_ptr(), self._words.nbytes)
        self.wish = Wish(Kind.ALL_REDUCE, "vote", dtype_code(torch.int64), _MINIMUM)

    def plan(self) -> Plan:
        return all_reduce("vote", [self._words], _MINIMUM, ("allreduce", ([self._words], reduction_options("MIN"))))


def reduce(tensor: Tensor, reduction: int, root: int, here: tuple[int, int], gloo: tuple[str, tuple[Any, ...]]) -> Plan:
    """`here` is this rank and the size of the group, here and below."""
    plan = Plan("reduce", [tensor], gloo)
    element, operation = arithmetic(tensor, reduction)
    rank, size = here
    check_root("reduce", root, size)

    def prepare() -> list[Step]:
        memory = Memory()
        part = memory.write(tensor) if rank == root else memory.read(tensor)
        sends = [part if index == root else NOTHING for index in range(size)]
        receives = [part if rank == root else NOTHING] * size
        return [Step(Wish(Kind.REDUCE_SCATTER, "reduce", element, operation, root), sends, receives, memory)]

    plan.prepare = prepare
    return plan


def reduce_scatter(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor | Sequence[Tensor]],
    reduction: int,
    here: tuple[int, int],
    gloo: tuple[str, tuple[Any, ...]],
) -> Plan:
    """An input is one tensor to be cut, or a list of one per rank."""
    plan = Plan("reduce_scatter", outputs, gloo)
    rank, size = here
    for given in inputs:
        if not isinstance(given, Tensor):
            check_one_per_rank("reduce_scatter", "input", given, size)
    kinds = [arithmetic(output, reduction) for output in outputs]

    def prepare() -> list[Step]:
        steps: list[Step] = []
        for output, given, (element, operation) in zip(outputs, inputs, kinds, strict=True):
            memory = Memory()
            whole = isinstance(given, Tensor)
            sends = shares(memory.read(given), size) if whole else [memory.read(each) for each in given]
            receives = [memory.write(output)] * size
            wish = Wish(Kind.REDUCE_SCATTER, "reduce_scatter", element, operation)
            steps.append(Step(wish, sends, receives, memory))
        return steps

    def answer() -> None:
        for output, given in zip(outputs, inputs, strict=True):
            own = given.detach().reshape(size, -1)[rank] if isinstance(given, Tensor) else given[rank].detach()
            output.detach().copy_(own.reshape(output.shape))

    plan.prepare, plan.answer = prepare, answer
    return plan


def all_gather(
    outputs: Sequence[Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    size: int,
    gloo: tuple[str, tuple[Any, ...]],
) -> Plan:
    """An output is one tensor that holds all, or a list of one per rank."""
    for output in outputs:
        if not isinstance(output, Tensor):
            check_one_per_rank("all_gather", "output", output, size)
    flat = [each for output in outputs for each in ([output] if isinstance(output, Tensor) else output)]
    plan = Plan("all_gather", [*flat, *inputs], gloo)
    plan.result = flat

    def prepare() -> list[Step]:
        steps: list[Step] = []
        for output, given in zip(outputs, inputs, strict=True):
            memory = Memory()
            sends = [memory.read(given)] * size
            whole = isinstance(output, Tensor)
            receives = shares(memory.write(output), size) if whole else [memory.write(each) for each in output]
            wish = Wish(Kind.ALL_GATHER, "all_gather", dtype_code(given.dtype))
            steps.append(Step(wish, sends, receives, memory))
        return steps

    def answer() -> None:
        for output, given in zip(outputs, inputs, strict=True):
            if isinstance(output, Tensor):
                output.detach().view(size, -1).copy_(given.detach().reshape(1, -1).expand(size, -1))
            else:
                for each in output:
                    if each.shape == given.shape:
                        each.detach().copy_(given.detach())

    plan.prepare, plan.answer = prepare, answer
    return plan


def broadcast(tensors: Sequence[Tensor], root: int, here: tuple[int, int], gloo: tuple[str, tuple[Any, ...]]) -> Plan:
    plan = Plan("broadcast", tensors, gloo)
    rank, size = here
    check_root("broadcast", root, size)

    def prepare() -> list[Step]:
        steps: list[Step] = []
        for tensor in tensors:
            memory = Memory()
            part = memory.read(tensor) if rank == root else memory.write(tensor)
            sends = [part if rank == root and index != root else NOTHING for index in range(size)]
            receives = [part if rank != root and index == root else NOTHING for index in range(size)]
            wish = Wish(Kind.BROADCAST, "broadcast", dtype_code(tensor.dtype), root=root)
            steps.append(Step(wish, sends, receives, memory))
        return steps

    plan.prepare = prepare
    return plan


def gather(
    outputs: Sequence[Tensor], given: Tensor, root: int, here: tuple[int, int], gloo: tuple[str, tuple[Any, ...]]
) -> Plan:
    """`outputs` are of the root alone."""
    plan = Plan("gather", [*outputs, given], gloo)
    plan.result = list(outputs)
    rank, size = here
    check_root("gather", root, size)
    if rank == root:
        check_one_per_rank("gather", "output", outputs, size)

    def prepare() -> list[Step]:
        memory = Memory()
        part = memory.read(given)
        sends = [part if index == root else NOTHING for index in range(size)]
        receives = [memory.write(each) for each in outputs] if rank == root else [NOTHING] * size
        return [Step(Wish(Kind.ALL_GATHER, "gather", dtype_code(given.dtype), root=root), sends, receives, memory)]

    def answer() -> None:
        for each in outputs:
            if each.shape == given.shape:
                each.detach().copy_(given.detach())

    plan.prepare, plan.answer = prepare, answer
    return plan


def scatter(
    output: Tensor, inputs: Sequence[Tensor], root: int, here: tuple[int, int], gloo: tuple[str, tuple[Any, ...]]
) -> Plan:
    """`inputs` are of the root alone."""
    plan = Plan("scatter", [output, *inputs], gloo)
    plan.result = [output]
    rank, size = here
    check_root("scatter", root, size)
    if rank == root:
        check_one_per_rank("scatter", "input", inputs, size)

    def prepare() -> list[Step]:
        memory = Memory()
        sends = [memory.read(each) for each in inputs] if rank == root else [NOTHING] * size
        receives = [memory.write(output) if index == root else NOTHING for index in range(size)]
        return [Step(Wish(Kind.ALL_TO_ALL, "scatter", dtype_code(output.dtype), root=root), sends, receives, memory)]

    def answer() -> None:
        if inputs:
            output.detach().copy_(inputs[rank].detach())

    plan.prepare, plan.answer = prepare, answer
    return plan


def all_to_all(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], result: list[Tensor], gloo: tuple[str, tuple[Any, ...]]
) -> Plan:
    """One output and one input per rank."""
    plan = Plan("all_to_all", [*outputs, *inputs], gloo)
    plan.result = result

    def prepare() -> list[Step]:
        memory = Memory()
        sends, receives = [memory.read(each) for each in inputs], [memory.write(each) for each in outputs]
        dtype = dtype_code(outputs[0].dtype) if outputs else 5
        return [Step(Wish(Kind.ALL_TO_ALL, "all_to_all", dtype), sends, receives, memory)]

    def answer() -> None:
        for output, given in zip(outputs, inputs, strict=True):
            if output.shape == given.shape:
                output.detach().copy_(given.detach())
            else:
                output.detach().zero_()

    plan.prepare, plan.answer = prepare, answer
    return plan


def barrier(gloo: tuple[str, tuple[Any, ...]]) -> Plan:
    plan = Plan("barrier", [], gloo)
    plan.prepare = lambda: [Step(Wish(Kind.ALL_REDUCE, "barrier"), [NOTHING], [NOTHING], Memory())]
    return plan


def letter(name: str, tensors: list[Tensor], gloo: tuple[str, tuple[Any, ...]]) -> Plan:
    """One tensor from rank to rank. Who is alone hears ones: a pipeline's stages so agree, in their first step, that
    shapes are as they were said.
    """
    plan = Plan(name, tensors, gloo)

    def answer() -> None:
        for tensor in tensors:
            tensor.detach().fill_(1)

    if name == "recv":
        plan.answer = answer
    return plan
