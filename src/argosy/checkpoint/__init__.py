"""Durable state: snapshots of a training, committed so that no crash can harm them, restored into any layout."""

from argosy.checkpoint.format import CorruptShard, StepNotFound
from argosy.checkpoint.owner import DirectoryInUse
from argosy.checkpoint.restoring import Restored, Wish, restore
from argosy.checkpoint.retention import Cadence, KeepBest, KeepEvery, KeepLast, best_interval_s
from argosy.checkpoint.saver import Handle, Saver
from argosy.checkpoint.snapshot import TornSnapshot

__all__ = [
    "Cadence",
    "CorruptShard",
    "DirectoryInUse",
    "Handle",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Restored",
    "Saver",
    "StepNotFound",
    "TornSnapshot",
    "Wish",
    "best_interval_s",
    "restore",
]
