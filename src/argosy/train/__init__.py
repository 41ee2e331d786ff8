"""Train through failures: a run's step loop, its state, and how both outlive lost ranks."""

from argosy.train.rows import Row, read_log
from argosy.train.run import Run
from argosy.train.step import Diverged, Step

__all__ = ["Diverged", "Row", "Run", "Step", "read_log"]
