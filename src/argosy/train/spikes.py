"""Decide whether a loss is far above what it was lately. Pure: all ranks are given the largest loss of any of them."""

import struct
from typing import Literal

import msgspec

from argosy.core import ArgosyError, ConfigError

NOTHING = float("-inf")
"""The loss of a step that was not checked."""


class LossSpike(ArgosyError):
    """The loss stays far above what it was."""


class Spike(msgspec.Struct, frozen=True):
    """What to do when the loss that `step.check` is given is more than `over` times its running mean.

    The mean is over about `window` steps, and nothing is a spike before so many were seen. The step is left out; with
    `then="rewind"` the run also goes back `back` steps, and the data in between are left out. `LossSpike` ends the run
    after `most` spikes in a row, or when it goes back to about the same step for the `most`-th time.
    """

    over: float = 3.0
    window: int = 50
    then: Literal["skip", "rewind"] = "skip"
    back: int = 100
    most: int = 5

    def __post_init__(self) -> None:
        if self.over <= 1 or self.window < 1 or self.back < 1 or self.most < 1 or self.then not in ("skip", "rewind"):
            raise ConfigError(
                f"not a valid Spike: {self}",
                hint='over is above 1; window, back and most are at least 1; then is "skip" or "rewind"',
            )


class Watch(msgspec.Struct, frozen=True):
    """What is remembered of the losses so far."""

    mean: float = 0.0
    seen: int = 0
    spikes: int = 0
    """In a row, until now."""

    def is_spike(self, policy: Spike, loss: float) -> bool:
        return self.seen >= policy.window and loss > policy.over * self.mean

    def after(self, policy: Spike, loss: float) -> "Watch":
        """What is remembered when a step with this loss counts, or was left out as a spike."""
        if loss == NOTHING:
            return self
        if self.is_spike(policy, loss):
            return msgspec.structs.replace(self, spikes=self.spikes + 1)
        seen = self.seen + 1
        return Watch(self.mean + (loss - self.mean) / min(seen, policy.window), seen)


def to_word(loss: float) -> int:
    """A number for votes: the larger the loss, the smaller the word."""
    (bits,) = struct.unpack("<q", struct.pack("<d", loss))
    return ~(bits if bits >= 0 else bits ^ 0x7FFFFFFFFFFFFFFF)


def from_word(word: int) -> float:
    bits = ~word
    return struct.unpack("<d", struct.pack("<q", bits if bits >= 0 else bits ^ 0x7FFFFFFFFFFFFFFF))[0]
