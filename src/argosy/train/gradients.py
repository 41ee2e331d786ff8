"""Find gradients that are infinite or not a number, before an optimizer of a step uses them."""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch


class Gradients:
    """The gradients of one attempt, for all optimizers of the run."""

    def __init__(self, optimizers: Iterable[Any], others: Iterable[Any]) -> None:
        self._optimizers = list(optimizers)
        # A scaler looks at each optimizer's gradients itself, and must see them to lower its scale.
        self._scaled = any(isinstance(each, torch.amp.GradScaler) and each.is_enabled() for each in others)
        self._first = True
        self._token = object()

    def check(self, optimizer: Any) -> tuple[bool, bool]:
        """Before `optimizer` steps: whether what was not checked yet is finite, and whether it was made since.

        Before the first update the gradients of all optimizers are checked: the vote that follows is about all of them.
        """
        if self._first:
            self._first = False
            found = list(_of([optimizer] if self._scaled else self._optimizers))
            if len(self._optimizers) > 1:
                for gradient in found:
                    gradient.argosy_checked = (self._token, gradient._version)
            return is_finite(found), False
        found = [each for each in _of([optimizer]) if _mark(each) != (self._token, each._version)]
        return is_finite(found), any(_mark(each)[0] is not self._token for each in found)


def _of(optimizers: Iterable[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)


def _mark(gradient: Any) -> tuple[Any, int]:
    return getattr(gradient, "argosy_checked", (None, 0))


def is_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether no number in them is infinite or not a number."""
    with torch.no_grad():
        return _is_finite(gradients)


def _is_finite(gradients: Iterable[torch.Tensor]) -> bool:
    parts = [part for gradient in gradients if (part := getattr(gradient, "_local_tensor", gradient)).numel()]
    if not parts:
        return True
    if all(part.layout is torch.strided for part in parts):
        kinds = {(part.dtype, part.device) for part in parts}
        alike = [parts] if len(kinds) == 1 else [[p for p in parts if (p.dtype, p.device) == kind] for kind in kinds]
        norms: list[Any] = [cast(Any, torch)._foreach_norm(each) for each in alike]
        if all(bool(torch.stack(each).sum().isfinite()) for each in norms):
            return True  # What is not finite stays so in a norm; large numbers may only seem to be.
    return all(bool(torch.isfinite(part.coalesce().values() if part.is_sparse else part).all()) for part in parts)
