"""What a rank records about itself while it runs: progress page, spans, journal, torch hooks.

Importing this room imports neither torch nor numpy; the hooks are installed when the script imports torch.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy
from argosy.observe.config import record_config as record_config
from argosy.observe.drain_process import DrainProcess as DrainProcess
from argosy.observe.governor import DETAIL as DETAIL
from argosy.observe.journal import Damage as Damage
from argosy.observe.journal import DamagedJournal as DamagedJournal
from argosy.observe.journal import Journal as Journal
from argosy.observe.journal import JournalEntry as JournalEntry
from argosy.observe.journal import follow as follow
from argosy.observe.journal import read_journal as read_journal
from argosy.observe.page import Page as Page
from argosy.observe.profile_request import STEPS_MAX as STEPS_MAX
from argosy.observe.profile_request import answers as answers
from argosy.observe.profile_request import request_profile as request_profile
from argosy.observe.progress import Activity as Activity
from argosy.observe.progress import Flag as Flag
from argosy.observe.progress import GroupProgress as GroupProgress
from argosy.observe.progress import Phase as Phase
from argosy.observe.progress import RankProgress as RankProgress
from argosy.observe.rank_journal import metrics_directory as metrics_directory
from argosy.observe.rank_journal import rank_journal as rank_journal
from argosy.observe.spans import Ring as Ring
from argosy.observe.spans import Span as Span
from argosy.observe.spans import SpanKind as SpanKind
from argosy.observe.spans import count as count
from argosy.observe.spans import mark_step as mark_step
from argosy.observe.spans import read_spans as read_spans
from argosy.observe.spans import record_spans as record_spans
from argosy.observe.spans import span as span
from argosy.observe.thread_clock import STEP_CPU as STEP_CPU
from argosy.observe.thread_clock import STEP_DELAY as STEP_DELAY
from argosy.observe.thread_clock import THREADS_CPU as THREADS_CPU
from argosy.observe.torch_hooks import attach as attach
from argosy.observe.torch_hooks import attached as attached
from argosy.observe.torch_hooks import count_collective as count_collective
from argosy.observe.torch_hooks import install as install
from argosy.observe.torch_hooks import install_when_imported as install_when_imported
from argosy.observe.torch_hooks import mark_waiting as mark_waiting
from argosy.observe.torch_hooks import take_over_steps as take_over_steps

if TYPE_CHECKING:  # These need numpy, and are imported when first used.
    from argosy.observe.columns import Columns as Columns
    from argosy.observe.columns import decode_frame as decode_frame
    from argosy.observe.columns import encode_frame as encode_frame
    from argosy.observe.columns import read_frames as read_frames
    from argosy.observe.drain import END_FILE as END_FILE
    from argosy.observe.drain import run_drain as run_drain

__getattr__, _ = lazy(__name__)
