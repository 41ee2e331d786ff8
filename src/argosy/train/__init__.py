"""Train through failures: a run's step loop, its state, and how both outlive lost ranks."""

from argosy.train.rows import Row, read_log
from argosy.train.run import Run
from argosy.train.spikes import LossSpike, Spike
from argosy.train.step import Diverged, Step

__all__ = ["Diverged", "LossSpike", "Row", "Run", "Spike", "Step", "read_log"]
