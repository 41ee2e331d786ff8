"""Optimizers that keep one state for all their parameters, one behind the other: it goes whole, and in their order."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from argosy.core import ConfigError

KINDS = (LBFGS,)


class Whole:
    """Such an optimizer's state, with the names of its parameters: in another order it would mean something else."""

    def __init__(self, title: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._title, self._optimizer = title, optimizer
        parameters: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        missing = [list(each.shape) for each in parameters if id(each) not in names]
        if missing:
            raise ConfigError(f"{title} holds a parameter of no module: {missing[0]}")
        self._names = [names[id(each)] for each in parameters]

    def state_dict(self) -> dict[str, Any]:
        return {"names": self._names, **self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict({key: state[key] for key in ("state", "param_groups")})

    def check(self, stored: Any) -> None:
        """Refuse what was stored of other parameters, or in another order."""
        then = stored.get("names") if isinstance(stored, dict) else None
        if stored is not None and then != self._names:
            kind = type(self._optimizer).__name__
            raise ConfigError(
                f"{self._title} was saved of {then or 'what is no ' + kind}, here it is a {kind} of {self._names}",
                hint="make it of the same parameters in the same order",
            )
