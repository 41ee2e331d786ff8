"""Durable state: snapshots of a training, committed so that no crash can harm them, restored into any layout."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy
from argosy.checkpoint.asking import checked_keep
from argosy.checkpoint.committing import prune_steps
from argosy.checkpoint.fitting import Wish
from argosy.checkpoint.format import CorruptShard, StepNotFound
from argosy.checkpoint.gathering import begin_series
from argosy.checkpoint.inspecting import StepInfo, TensorInfo, diff, list_steps, opened, tensors, verify
from argosy.checkpoint.keeper.client import Keeping
from argosy.checkpoint.keeper.messages import Overtaken
from argosy.checkpoint.owner import DirectoryInUse
from argosy.checkpoint.restoring import Restored, restore
from argosy.checkpoint.retention import Cadence, KeepBack, KeepBest, KeepEvery, KeepLast, best_interval_s
from argosy.checkpoint.saver import Handle, Mark, Saver
from argosy.checkpoint.snapshot import TornSnapshot

if TYPE_CHECKING:
    from argosy.checkpoint.formats import export as export
    from argosy.checkpoint.formats import import_ as import_

_HOMES: dict[str, str] = dict.fromkeys(("export", "import_"), "argosy.checkpoint.formats")
# What knows torch is imported when it is first used.
__getattr__, _torch_names = lazy(__name__, _HOMES)

__all__ = [
    "Cadence",
    "CorruptShard",
    "DirectoryInUse",
    "Handle",
    "KeepBack",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Keeping",
    "Mark",
    "Overtaken",
    "Restored",
    "Saver",
    "StepInfo",
    "StepNotFound",
    "TensorInfo",
    "TornSnapshot",
    "Wish",
    "begin_series",
    "best_interval_s",
    "checked_keep",
    "diff",
    "export",
    "import_",
    "list_steps",
    "opened",
    "prune_steps",
    "restore",
    "tensors",
    "verify",
]
