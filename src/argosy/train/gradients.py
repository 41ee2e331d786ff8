"""Find gradients that are infinite or not a number, before an optimizer of a step uses them."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from argosy._select import native

_ELEMENTS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""What `native.are_finite` knows."""
_SWEPT_BYTES = 32 << 20
"""So much is looked through on one thread, where a kernel per gradient costs more; beyond it torch uses several."""


class Gradients:
    """The gradients of one attempt, for all optimizers of the run."""

    def __init__(self, optimizers: Iterable[Any], others: Iterable[Any]) -> None:
        self._optimizers, self._others = list(optimizers), others
        self._first = True
        self._token = object()

    def check(self, optimizer: Any) -> tuple[bool, bool]:
        """Before `optimizer` steps: whether what was not checked yet is finite, and whether it was made since.

        Before the first update the gradients of all optimizers are checked: the vote that follows is about all of them.
        """
        if self._first:
            self._first = False
            if len(self._optimizers) == 1:
                return is_finite(list(_of(self._optimizers))), False
            found = list(_of([optimizer] if self._is_scaled() else self._optimizers))
            for gradient in found:
                gradient.argosy_checked = (self._token, gradient._version)
            return is_finite(found), False
        found = [each for each in _of([optimizer]) if _mark(each) != (self._token, each._version)]
        return is_finite(found), any(_mark(each)[0] is not self._token for each in found)

    def _is_scaled(self) -> bool:
        """A scaler looks at each optimizer's gradients itself, and must see them to lower its scale."""
        return any(isinstance(each, torch.amp.GradScaler) and each.is_enabled() for each in self._others)


def has_gradients(optimizer: Any) -> bool:
    """Whether a step of it would change anything."""
    return any(True for _ in _of([optimizer]))


def _of(optimizers: Iterable[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (gradient for parameter in group["params"] if (gradient := parameter.grad) is not None)


def _mark(gradient: Any) -> tuple[Any, int]:
    return getattr(gradient, "argosy_checked", (None, 0))


def is_finite(gradients: Iterable[torch.Tensor], room: int = _SWEPT_BYTES) -> bool:
    """Whether no number in them is infinite or not a number."""
    swept: dict[torch.dtype, list[tuple[int, int]]] = {}
    others: list[torch.Tensor] = []
    parts = [getattr(each, "_local_tensor", each) for each in gradients]
    for part in parts:
        plain = type(part) is torch.Tensor and part.is_cpu and part.dtype in _ELEMENTS and part.layout is torch.strided
        if plain and room > 0 and part.is_contiguous():
            size = part.nbytes
            room -= size
            swept.setdefault(part.dtype, []).append((part.data_ptr(), size))
        elif part.numel():
            others.append(part)
    if not all(native.are_finite(pieces, _ELEMENTS[dtype]) for dtype, pieces in swept.items()):
        return False
    if not others:
        return True
    with torch.no_grad():
        return _have_finite_norms(others) or all(map(_is_finite, others))


def _have_finite_norms(parts: list[torch.Tensor]) -> bool:
    """What is not finite stays so in a norm; large numbers may only seem to be."""
    if not all(part.layout is torch.strided for part in parts):
        return False
    kinds = {(part.dtype, part.device) for part in parts}
    norms: list[Any] = [
        cast(Any, torch)._foreach_norm([part for part in parts if (part.dtype, part.device) == kind]) for kind in kinds
    ]
    return all(math.isfinite(torch.stack(each).sum().item()) for each in norms)


def _is_finite(part: torch.Tensor) -> bool:
    return bool(torch.isfinite(part.coalesce().values() if part.is_sparse else part).all())
