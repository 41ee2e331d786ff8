"""What a run remembers besides tensors: the user's counters, cursors, the best values, what bits depend on."""
# pyright: reportUnknownMemberType=false

import sys
from typing import Any

import msgspec
import torch

from argosy.data import Loader, Queue
from argosy.train.rows import Best
from argosy.train.spikes import Watch


class Ledger:
    """Goes with the tracked state wherever it goes."""

    def __init__(self, bits: dict[str, Any]) -> None:
        self.state: dict[str, Any] = {}
        self.bests: dict[str, Best] = {}
        self.loaders: list[Loader | Queue] = []
        self.bits = bits
        self.stored_bits: dict[str, Any] = {}
        self.eras: list[int] = []
        """The steps at which the run went on when it had gone back to an older one."""
        self.watch = Watch()
        self.left_out = 0
        """Steps in a row whose numbers were not finite."""
        self._waiting: list[dict[str, Any]] = []
        """States of loaders that the script has not used yet."""

    def use(self, loader: Loader | Queue) -> None:
        """Keep a loader's cursor from now on; it goes on where it was."""
        if loader in self.loaders:
            return
        number = len(self.loaders)
        self.loaders.append(loader)
        if number < len(self._waiting):
            loader.load_state_dict(self._waiting[number])

    @property
    def exhausted(self) -> bool:
        """Whether a loader has no more samples: there is no next step."""
        return any(loader.exhausted for loader in self.loaders)

    def changing(self) -> dict[str, Any]:
        """What may change inside a step, before it counts."""
        cursors = [loader.state_dict() for loader in self.loaders]
        return {"state": self.state, "loaders": cursors + self._waiting[len(cursors) :]}

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.changing(),
            "bests": {name: msgspec.to_builtins(best) for name, best in self.bests.items()},
            "bits": self.bits,
            "eras": self.eras,
            "watch": msgspec.to_builtins(self.watch),
            "left_out": self.left_out,
        }

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self.state.clear()
        self.state.update(found["state"])
        self._waiting = list(found["loaders"])
        for loader, state in zip(self.loaders, self._waiting, strict=False):
            loader.load_state_dict(state)
        if "bits" not in found:  # Of `changing`.
            return
        self.bests = {name: msgspec.convert(best, Best) for name, best in found["bests"].items()}
        self.stored_bits = found["bits"]
        self.eras = list(found.get("eras", []))
        self.watch = msgspec.convert(found.get("watch", {}), Watch)
        self.left_out = found.get("left_out", 0)


def bits_record(size: int, seed: int) -> dict[str, Any]:
    """What results depend on, bit for bit, besides the script."""
    return {
        "torch": str(torch.__version__),
        "cpu": str(torch.backends.cpu.get_cpu_capability()),
        "threads": torch.get_num_threads(),
        "ranks": size,
        "seed": seed,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def bits_differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What has changed since, one clause each."""
    return [f"{name} was {stored[name]}, is {now.get(name)}" for name in stored if stored[name] != now.get(name)]
