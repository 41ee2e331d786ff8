"""Durable state: snapshots of a training, committed so that no crash can harm them, restored into any layout."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy
from argosy.checkpoint.arguments import checked_keep
from argosy.checkpoint.commit_step import prune_steps
from argosy.checkpoint.format import CorruptShard, StepNotFound, Unreadable
from argosy.checkpoint.jobs import Handle
from argosy.checkpoint.keeper.client import Keeping
from argosy.checkpoint.keeper.messages import Overtaken
from argosy.checkpoint.owner import DirectoryInUse
from argosy.checkpoint.plain import in_a_line
from argosy.checkpoint.rank_exchange import begin_series
from argosy.checkpoint.restore_plan import Wish
from argosy.checkpoint.restore_step import Restored, restore
from argosy.checkpoint.retention import Cadence, KeepBack, KeepBest, KeepEvery, KeepLast, best_interval_s
from argosy.checkpoint.saver import Mark, Saver
from argosy.checkpoint.snapshot import TornSnapshot
from argosy.checkpoint.step_index import ELSEWHERE
from argosy.checkpoint.step_info import StepInfo, TensorInfo, diff, list_steps, opened, plain_values, tensors, verify
from argosy.checkpoint.stores import foreign_kind
from argosy.checkpoint.whole_save import save_whole

if TYPE_CHECKING:
    from argosy.checkpoint.formats import export as export
    from argosy.checkpoint.formats import import_ as import_

# What knows torch is imported when it is first used.
__getattr__, _torch_names = lazy(__name__)

__all__ = [
    "ELSEWHERE",
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
    "Unreadable",
    "Wish",
    "begin_series",
    "best_interval_s",
    "checked_keep",
    "diff",
    "export",
    "foreign_kind",
    "import_",
    "in_a_line",
    "list_steps",
    "opened",
    "plain_values",
    "prune_steps",
    "restore",
    "save_whole",
    "tensors",
    "verify",
]
