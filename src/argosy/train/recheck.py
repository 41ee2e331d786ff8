"""Now and then a step is computed twice before it counts: a rank whose own bits differ the second time is not to be
trusted.

Compared is what each rank computes itself: the gradient of every parameter before it is exchanged. Parameters of FSDP2
and other DTensors are not covered, nor is what the optimizer does.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from argosy.core import ConfigError, PeerLost
from argosy.train.tracking import bytes_of

if TYPE_CHECKING:
    from argosy.train.run import Run


class Recheck:
    """Whether and how steps are computed twice."""

    def __init__(self, every: int | None) -> None:
        if every is not None and every < 1:
            raise ConfigError(f"recheck must be a number of steps, at least 1: {every}")
        self.every = every
        self._first: tuple[int, str] | None = None
        self._now: dict[int, Any] = {}
        self._hooks: list[Any] = []

    def wants(self, number: int) -> bool:
        return self.every is not None and (number + 1) % self.every == 0

    def watch(self, parameters: Iterable[torch.Tensor]) -> int:
        """Look at the gradients of this attempt; returns how many parameters are covered."""
        self.let_go()
        self._now = {}
        covered = [each for each in parameters if each.requires_grad and not hasattr(each, "to_local")]
        for number, parameter in enumerate(covered):
            self._now[number] = hashlib.blake2b(digest_size=8)
            self._hooks.append(parameter.register_hook(self._hook(number)))
        return len(covered)

    def _hook(self, number: int) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            self._now[number].update(bytes_of(gradient.detach()))

        return hook

    def let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def differs(self, number: int) -> bool | None:
        """Whether the second computation of a step differs from the first; None after the first."""
        digest = hashlib.blake2b(b"".join(self._now[key].digest() for key in sorted(self._now))).hexdigest()
        if self._first is None or self._first[0] != number:
            self._first = (number, digest)
            return None
        return self._first[1] != digest

    def forget(self) -> None:
        """A loss came between: the step is computed twice anew."""
        self._first = None


def distrust(run: "Run", number: int) -> NoReturn:
    """This rank computed a step twice and got different gradients: another process takes its place."""
    run.tell(
        f"rank {run.rank} computed step {number} twice and got different gradients: "
        "its memory or processor is faulty, or the script draws random numbers of its own"
    )
    if run.crew.kind == "replaceable":
        run.crew.group.give_up(PeerLost(f"rank {run.rank}", "it computed different bits the second time"))
    raise SystemExit(1)
