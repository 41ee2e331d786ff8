"""Optimizers whose state is not where torch keeps it: who has it, and what would be lost in silence."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from functools import cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from argosy.core import ConfigError


class Owner(NamedTuple):
    """The optimizer of a parameter, and its group there."""

    title: str
    optimizer: Optimizer
    group: dict[str, Any]
    holder: Optimizer
    """The optimizer that has the state: itself, or one inside."""
    rank: int | None = None
    """The only rank that has the state, as in ZeroRedundancyOptimizer; None: each has that of its own part."""


def inner_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that does the work inside of wrappers, as accelerate's or torch's ZeroRedundancyOptimizer are."""
    while True:
        inner = getattr(optimizer, "optim" if is_zero(optimizer) else "optimizer", None)
        if not isinstance(inner, Optimizer):
            return optimizer
        optimizer = inner


def is_zero(optimizer: Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer: known by its name, as its module is slow to import."""
    return _is_zero(type(optimizer))


@cache
def _is_zero(kind: type) -> bool:
    return any(each.__name__ == "ZeroRedundancyOptimizer" for each in kind.__mro__)


def holder_of(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state of this one's parameters.

    Raises:
        ConfigError: it steps where nobody can wait for a copy, or has state that would not be found.
    """
    if is_zero(optimizer):
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise ConfigError(
                "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps inside of backward, where it cannot be held up",
                hint="make it with overlap_with_ddp=False",
            )
        return inner_of(optimizer)
    _check_nothing_is_elsewhere(optimizer)
    return optimizer


def rank_of(optimizer: Any, parameter: Tensor) -> int | None:
    """The only rank that has the state of a parameter."""
    if not is_zero(optimizer):
        return None
    return dist.get_global_rank(optimizer.process_group, optimizer._param_to_rank[parameter])


def _check_nothing_is_elsewhere(optimizer: Optimizer) -> None:
    """Refuse state that is neither of a parameter nor in `optimizer.state`."""
    kind = type(optimizer).__name__
    keys: list[Any] = list(optimizer.state)
    odd = [key for key in keys if not isinstance(key, Tensor)]
    if odd:
        raise ConfigError(
            f"{kind} has state of {odd[0]!r}, which is no parameter: it would be lost",
            hint="give it to the dict under a name of its own, and put it back after restore",
        )
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer) and any(key not in optimizer.state for key in inner.state):
            raise ConfigError(
                f"{kind} keeps state in its {name}, a {type(inner).__name__}: it would be lost",
                hint=f"give that to the dict instead: .{name}",
            )
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    said = optimizer.state_dict()
    more = [key for key in said if key not in ("state", "param_groups")]
    if more:
        raise ConfigError(
            f"{kind} says {more[0]!r} in its state_dict, besides the state of parameters: it would be lost",
            hint="give it to the dict under a name of its own, and put it back after restore",
        )
    if len(said.get("state", ())) > len(optimizer.state):
        raise ConfigError(
            f"{kind} has state in its state_dict that is not in its .state: it would be lost",
            hint="give the optimizer to the dict that has it",
        )
