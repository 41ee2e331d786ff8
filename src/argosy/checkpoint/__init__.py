"""Durable state: snapshots of a training, committed so that no crash can harm them, restored into any layout."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.checkpoint.arguments import checked_keep as checked_keep
    from argosy.checkpoint.commit_step import prune_steps as prune_steps
    from argosy.checkpoint.dcp_storage import DcpReader as DcpReader
    from argosy.checkpoint.dcp_storage import DcpWriter as DcpWriter
    from argosy.checkpoint.format import CorruptShard as CorruptShard
    from argosy.checkpoint.format import StepNotFound as StepNotFound
    from argosy.checkpoint.format import Unreadable as Unreadable
    from argosy.checkpoint.formats import export as export
    from argosy.checkpoint.formats import import_ as import_
    from argosy.checkpoint.jobs import Handle as Handle
    from argosy.checkpoint.keeper.client import Keeping as Keeping
    from argosy.checkpoint.keeper.messages import Overtaken as Overtaken
    from argosy.checkpoint.owner import DirectoryInUse as DirectoryInUse
    from argosy.checkpoint.plain import in_a_line as in_a_line
    from argosy.checkpoint.rank_exchange import alone as alone
    from argosy.checkpoint.rank_exchange import begin_series as begin_series
    from argosy.checkpoint.restore_plan import Wish as Wish
    from argosy.checkpoint.restore_step import Restored as Restored
    from argosy.checkpoint.restore_step import restore as restore
    from argosy.checkpoint.retention import Cadence as Cadence
    from argosy.checkpoint.retention import KeepBack as KeepBack
    from argosy.checkpoint.retention import KeepBest as KeepBest
    from argosy.checkpoint.retention import KeepEvery as KeepEvery
    from argosy.checkpoint.retention import KeepLast as KeepLast
    from argosy.checkpoint.retention import best_interval_s as best_interval_s
    from argosy.checkpoint.save_interval import failure_rate as failure_rate
    from argosy.checkpoint.saver import Mark as Mark
    from argosy.checkpoint.saver import Saver as Saver
    from argosy.checkpoint.snapshot import TornSnapshot as TornSnapshot
    from argosy.checkpoint.step_index import ELSEWHERE as ELSEWHERE
    from argosy.checkpoint.step_info import StepInfo as StepInfo
    from argosy.checkpoint.step_info import TensorInfo as TensorInfo
    from argosy.checkpoint.step_info import diff as diff
    from argosy.checkpoint.step_info import list_steps as list_steps
    from argosy.checkpoint.step_info import opened as opened
    from argosy.checkpoint.step_info import plain_values as plain_values
    from argosy.checkpoint.step_info import tensors as tensors
    from argosy.checkpoint.step_info import verify as verify
    from argosy.checkpoint.stores import foreign_kind as foreign_kind
    from argosy.checkpoint.whole_save import save_whole as save_whole

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
