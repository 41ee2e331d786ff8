"""What each operation of torch moves between ranks, and its result when there are no peers.

A plan can be carried out in three ways: through shared memory (`prepare` says which bytes go where), through a backend
of torch (`torch_call`), or locally (`answer`), as if the peers held the same tensors. Constructors run locally before a
replacement rank has joined, and so does the rest of a step after a loss, up to its vote.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from argosy._exchange import Part
from argosy.collective.arguments import REDUCTIONS, check_one_per_rank, check_root, reduction_options
from argosy.collective.request import REDUCIBLE, Kind, Request, dtype_code
from argosy.transfer import to_host

Tensor = torch.Tensor
TorchCall = tuple[str, tuple[Any, ...]]
"""A method of torch's backends, and its arguments."""
NOTHING: Part = (0, 0)

_SUM, _AVERAGE, _PRODUCT, _MINIMUM, _MAXIMUM, _AND, _OR, _XOR = range(8)
_OF_BOOLEANS = {_SUM: _OR, _MAXIMUM: _OR, _OR: _OR, _PRODUCT: _AND, _MINIMUM: _AND, _AND: _AND, _XOR: _XOR}


class TensorMemory:
    """The memory of tensors; one that is not contiguous, or on a device, gets a copy, which is written back."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._back: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Part:
        flat = tensor.detach().contiguous()
        if not flat.is_cpu:
            flat = to_host(flat)
        self._kept.append(flat)
        return flat.data_ptr(), flat.numel() * flat.element_size()

    def write(self, tensor: Tensor) -> Part:
        """Return the part that the engine fills; it holds the tensor's values before."""
        plain = tensor.detach()
        part = self.read(plain)
        if not (plain.is_cpu and plain.is_contiguous()):
            self._back.append((plain, self._kept[-1]))
        return part

    def write_back(self) -> None:
        for tensor, flat in self._back:
            tensor.copy_(flat)
        self._back.clear()


class EngineCall(NamedTuple):
    """One call of the engine, and the memory that it uses."""

    request: Request
    sends: Sequence[Part]
    receives: Sequence[Part]
    memory: TensorMemory


class OperationPlan:
    """One operation as torch asked for it."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        torch_call: TorchCall,
        prepare: Callable[[], list[EngineCall]] = list,
        answer: Callable[[], None] = lambda: None,
        result: Sequence[Tensor] | None = None,
    ) -> None:
        self.name, self.tensors, self.torch_call, self.prepare, self.answer = name, tensors, torch_call, prepare, answer
        self.after: Callable[[], object] = lambda: None
        self.synchronous = True
        """Its caller waits for it."""
        self.result = list(tensors if result is None else result)
        self.torch_work: Any = None
        """The work of an engine that returns before its operation is done, to be waited for by the caller."""
        self.explain: Callable[[RuntimeError], NoReturn] | None = None
        """Turns an error of that work into a loss."""


def arithmetic(tensor: Tensor, reduction: int) -> tuple[int, int]:
    """Return the element type and the reduction in the engine's numbers.

    Raises:
        RuntimeError: these elements have no such reduction; Gloo raises the same.
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
    """Divide a part into `size` equal parts."""
    step = part[1] // size
    return [(part[0] + index * step, step) for index in range(size)]


def all_reduce(name: str, tensors: Sequence[Tensor], reduction: int, torch_call: TorchCall) -> OperationPlan:
    kinds = [arithmetic(tensor, reduction) for tensor in tensors if not tensor.is_sparse]

    def call(tensor: Tensor, kind: tuple[int, int]) -> EngineCall:
        memory = TensorMemory()
        part = memory.write(tensor)
        return EngineCall(Request(Kind.ALL_REDUCE, name, *kind), [part], [part], memory)

    return OperationPlan(name, tensors, torch_call, lambda: list(map(call, tensors, kinds)))


class Ballot:
    """The words of a vote, in memory that the engine reduces in place to their minima."""

    def __init__(self, count: int) -> None:
        self._words = torch.empty(count, dtype=torch.int64)
        self._bytes, self._format = self._words.numpy().data.cast("B"), struct.Struct(f"={count}q")
        self.count = count
        self.part: Part = (self._words.data_ptr(), self._words.nbytes)
        self.request = Request(Kind.ALL_REDUCE, "vote", dtype_code(torch.int64), _MINIMUM)

    def put(self, words: Sequence[int]) -> None:
        self._format.pack_into(self._bytes, 0, *words)

    def minima(self) -> list[int]:
        return list(self._format.unpack_from(self._bytes))

    def plan(self) -> OperationPlan:
        return all_reduce("vote", [self._words], _MINIMUM, ("allreduce", ([self._words], reduction_options("MIN"))))


def reduce(tensor: Tensor, reduction: int, root: int, here: tuple[int, int], torch_call: TorchCall) -> OperationPlan:
    """`here` is this rank and the size of the group, also in the functions below."""
    element, operation = arithmetic(tensor, reduction)
    rank, size = here
    check_root("reduce", root, size)

    def prepare() -> list[EngineCall]:
        memory = TensorMemory()
        part = memory.write(tensor) if rank == root else memory.read(tensor)
        sends = [part if index == root else NOTHING for index in range(size)]
        receives = [part if rank == root else NOTHING] * size
        request = Request(Kind.REDUCE_SCATTER, "reduce", element, operation, root)
        return [EngineCall(request, sends, receives, memory)]

    return OperationPlan("reduce", [tensor], torch_call, prepare)


def reduce_scatter(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor | Sequence[Tensor]],
    reduction: int,
    here: tuple[int, int],
    torch_call: TorchCall,
) -> OperationPlan:
    """Each input is one tensor to be divided, or a list of one tensor per rank."""
    rank, size = here
    for given in inputs:
        if not isinstance(given, Tensor):
            check_one_per_rank("reduce_scatter", "input", given, size)
    kinds = [arithmetic(output, reduction) for output in outputs]

    def call(output: Tensor, given: Tensor | Sequence[Tensor], kind: tuple[int, int]) -> EngineCall:
        memory = TensorMemory()
        whole = isinstance(given, Tensor)
        sends = shares(memory.read(given), size) if whole else [memory.read(each) for each in given]
        receives = [memory.write(output)] * size
        return EngineCall(Request(Kind.REDUCE_SCATTER, "reduce_scatter", *kind), sends, receives, memory)

    def answer() -> None:
        for output, given in zip(outputs, inputs, strict=True):
            own = given.detach().reshape(size, -1)[rank] if isinstance(given, Tensor) else given[rank].detach()
            output.detach().copy_(own.reshape(output.shape))

    return OperationPlan("reduce_scatter", outputs, torch_call, lambda: list(map(call, outputs, inputs, kinds)), answer)


def all_gather(
    outputs: Sequence[Tensor | Sequence[Tensor]], inputs: Sequence[Tensor], size: int, torch_call: TorchCall
) -> OperationPlan:
    """Each output is one tensor for all ranks, or a list of one tensor per rank."""
    for output in outputs:
        if not isinstance(output, Tensor):
            check_one_per_rank("all_gather", "output", output, size)
    flat = [each for output in outputs for each in ([output] if isinstance(output, Tensor) else output)]

    def call(output: Tensor | Sequence[Tensor], given: Tensor) -> EngineCall:
        memory = TensorMemory()
        sends = [memory.read(given)] * size
        whole = isinstance(output, Tensor)
        receives = shares(memory.write(output), size) if whole else [memory.write(each) for each in output]
        return EngineCall(Request(Kind.ALL_GATHER, "all_gather", dtype_code(given.dtype)), sends, receives, memory)

    def answer() -> None:
        for output, given in zip(outputs, inputs, strict=True):
            if isinstance(output, Tensor):
                output.detach().view(size, -1).copy_(given.detach().reshape(1, -1).expand(size, -1))
            else:
                _copy_to_all(given, output)

    return OperationPlan(
        "all_gather", [*flat, *inputs], torch_call, lambda: list(map(call, outputs, inputs)), answer, flat
    )


def _copy_to_all(given: Tensor, outputs: Sequence[Tensor]) -> None:
    for output in outputs:
        if output.shape == given.shape:
            output.detach().copy_(given.detach())


def broadcast(tensors: Sequence[Tensor], root: int, here: tuple[int, int], torch_call: TorchCall) -> OperationPlan:
    rank, size = here
    check_root("broadcast", root, size)

    def call(tensor: Tensor) -> EngineCall:
        memory = TensorMemory()
        part = memory.read(tensor) if rank == root else memory.write(tensor)
        sends = [part if rank == root and index != root else NOTHING for index in range(size)]
        receives = [part if rank != root and index == root else NOTHING for index in range(size)]
        request = Request(Kind.BROADCAST, "broadcast", dtype_code(tensor.dtype), root=root)
        return EngineCall(request, sends, receives, memory)

    return OperationPlan("broadcast", tensors, torch_call, lambda: list(map(call, tensors)))


def gather(
    outputs: Sequence[Tensor], given: Tensor, root: int, here: tuple[int, int], torch_call: TorchCall
) -> OperationPlan:
    """Only the root has `outputs`."""
    rank, size = here
    check_root("gather", root, size)
    if rank == root:
        check_one_per_rank("gather", "output", outputs, size)

    def prepare() -> list[EngineCall]:
        memory = TensorMemory()
        part = memory.read(given)
        sends = [part if index == root else NOTHING for index in range(size)]
        receives = [memory.write(each) for each in outputs] if rank == root else [NOTHING] * size
        request = Request(Kind.ALL_GATHER, "gather", dtype_code(given.dtype), root=root)
        return [EngineCall(request, sends, receives, memory)]

    return OperationPlan(
        "gather", [*outputs, given], torch_call, prepare, lambda: _copy_to_all(given, outputs), list(outputs)
    )


def scatter(
    output: Tensor, inputs: Sequence[Tensor], root: int, here: tuple[int, int], torch_call: TorchCall
) -> OperationPlan:
    """Only the root has `inputs`."""
    rank, size = here
    check_root("scatter", root, size)
    if rank == root:
        check_one_per_rank("scatter", "input", inputs, size)

    def prepare() -> list[EngineCall]:
        memory = TensorMemory()
        sends = [memory.read(each) for each in inputs] if rank == root else [NOTHING] * size
        receives = [memory.write(output) if index == root else NOTHING for index in range(size)]
        request = Request(Kind.ALL_TO_ALL, "scatter", dtype_code(output.dtype), root=root)
        return [EngineCall(request, sends, receives, memory)]

    def answer() -> None:
        if inputs:
            output.detach().copy_(inputs[rank].detach())

    return OperationPlan("scatter", [output, *inputs], torch_call, prepare, answer, [output])


def all_to_all(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], result: list[Tensor], torch_call: TorchCall
) -> OperationPlan:
    """There is one output and one input per rank."""

    def prepare() -> list[EngineCall]:
        memory = TensorMemory()
        sends, receives = [memory.read(each) for each in inputs], [memory.write(each) for each in outputs]
        dtype = dtype_code(outputs[0].dtype) if outputs else 5
        return [EngineCall(Request(Kind.ALL_TO_ALL, "all_to_all", dtype), sends, receives, memory)]

    def answer() -> None:
        for output, given in zip(outputs, inputs, strict=True):
            if output.shape == given.shape:
                output.detach().copy_(given.detach())
            else:
                output.detach().zero_()

    return OperationPlan("all_to_all", [*outputs, *inputs], torch_call, prepare, answer, result)


def barrier(torch_call: TorchCall) -> OperationPlan:
    def prepare() -> list[EngineCall]:
        return [EngineCall(Request(Kind.ALL_REDUCE, "barrier"), [NOTHING], [NOTHING], TensorMemory())]

    return OperationPlan("barrier", [], torch_call, prepare)


def point_to_point(name: str, tensors: list[Tensor], torch_call: TorchCall) -> OperationPlan:
    """A send or a receive of one tensor.

    Without peers a receive gives ones: in their first step, the stages of a pipeline then find that all agree on the
    shapes.
    """

    def answer() -> None:
        for tensor in tensors if name == "recv" else ():
            tensor.detach().fill_(1)

    return OperationPlan(name, tensors, torch_call, answer=answer)
