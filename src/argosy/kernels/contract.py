"""The contract of a kernel, and the one function that tests it.

K1  torch's own checks of a custom op pass: schema, fake implementation, autograd registration.
K2  Gradients agree with finite differences in fp64.
K3  The error against the fp64 reference is at most twice that of the reference in the kernel's dtype.
K4  Odd and adversarial inputs give what the reference gives, infinities and all.
K5  The bits do not depend on the number of threads, unless those of the reference do: BLAS may split a product.
K6  torch.compile gives the same result.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from argosy.core import ArgosyError

Case = tuple[Any, ...]


class RuleBroken(ArgosyError):
    """A kernel breaks its contract; the message begins with the rule."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An op with what is needed to test and price it."""

    name: str
    op: Callable[..., Any]
    """The custom op, or a function around it."""
    overload: Any
    """The op as `torch.ops` knows it."""
    reference: Callable[..., Any]
    cases: Callable[[torch.dtype], Sequence[Case]]
    """Arguments for a dtype: usual, odd and adversarial."""
    cost: Callable[..., tuple[float, float]]
    """Floating-point operations and bytes moved, from the arguments."""
    differentiable: bool = True


def check(kernel: Kernel, *, compiled: bool = False) -> None:
    """Test everything that the contract promises; `compiled` adds K6, which takes seconds.

    Raises:
        RuleBroken: a rule is broken.
    """
    for case in kernel.cases(torch.float32):
        check_values(kernel, case)
        check_threads(kernel, case)
    small = kernel.cases(torch.float64)[0]
    try:
        torch.library.opcheck(kernel.overload, kernel.cases(torch.float32)[0], test_utils=UTILS)
    except Exception as error:
        raise RuleBroken(f"K1: {kernel.name}: {str(error).splitlines()[0]}") from error
    if kernel.differentiable:
        try:
            torch.autograd.gradcheck(lambda *args: first(kernel.op(*args)), tuple(grown(each) for each in small))
        except RuntimeError as error:
            raise RuleBroken(f"K2: {kernel.name}: {str(error).splitlines()[0]}") from error
    if compiled:
        case = kernel.cases(torch.float32)[0]
        if not close(first(torch.compile(kernel.op)(*case)), first(kernel.op(*case)), 1e-6):
            raise RuleBroken(f"K6: {kernel.name}: torch.compile changes the result")


UTILS = ("test_schema", "test_autograd_registration", "test_faketensor")


def grown(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.clone().requires_grad_() if floats else value


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def with_gradients(function: Callable[..., Any], case: Case, differentiable: bool) -> list[Tensor]:
    """The result, and the gradients of its sum with respect to every float argument."""
    args = [grown(each) if differentiable else each for each in case]
    result = function(*args)
    results = list(result) if isinstance(result, tuple) else [result]
    inputs = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
    if differentiable and inputs and results[0].requires_grad:
        weights = torch.linspace(0.5, 1.5, results[0].numel(), dtype=results[0].dtype).view_as(results[0])
        results += torch.autograd.grad((results[0] * weights).sum(), inputs)
    return [each.detach() for each in results]


def check_values(kernel: Kernel, case: Case) -> None:
    """K3 and K4."""
    exact = with_gradients(kernel.reference, tuple(wide(each) for each in case), kernel.differentiable)
    plain = with_gradients(kernel.reference, case, kernel.differentiable)
    found = with_gradients(kernel.op, case, kernel.differentiable)
    for index, (true, eager, ours) in enumerate(zip(exact, plain, found, strict=True)):
        if not torch.equal(torch.isfinite(eager), torch.isfinite(ours)):
            raise RuleBroken(f"K4: {kernel.name}: result {index} is finite in other places than the reference")
        good = torch.isfinite(true) & torch.isfinite(ours)
        allowed = 2 * error_of(eager[good], true[good]) + 4 * torch.finfo(torch.float32).eps
        if error_of(ours[good], true[good]) > allowed:
            raise RuleBroken(f"K3: {kernel.name}: result {index} errs by {error_of(ours[good], true[good]):.3g}")


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def error_of(found: Tensor, true: Tensor) -> float:
    if not found.numel() or not found.is_floating_point():
        return 0.0
    scale = max(float(true.abs().max()), 1e-30)
    return float((found.double() - true).abs().max()) / scale


def check_threads(kernel: Kernel, case: Case) -> None:
    """K5."""
    ours = over_threads(kernel.op, case, kernel.differentiable)
    if all(same_bits(ours[0], other) for other in ours[1:]):
        return
    plain = over_threads(kernel.reference, case, kernel.differentiable)
    if all(same_bits(plain[0], other) for other in plain[1:]):
        raise RuleBroken(f"K5: {kernel.name}: the bits depend on the number of threads")


def over_threads(function: Callable[..., Any], case: Case, differentiable: bool) -> list[list[Tensor]]:
    """The results on 1, 2 and 8 threads."""
    kept = torch.get_num_threads()
    found: list[list[Tensor]] = []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            found.append(with_gradients(function, case, differentiable))
    finally:
        torch.set_num_threads(kept)
    return found


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
