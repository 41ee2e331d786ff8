"""What a rank records about itself while it runs: progress page, spans, journal, torch hooks.

Importing this room imports neither torch nor numpy; the hooks are installed when the script imports torch.
"""

from argosy.observe.journal import Damage, DamagedJournal, Journal, JournalEntry, follow, read_journal
from argosy.observe.page import Page
from argosy.observe.progress import Activity, Flag, GroupProgress, Phase, Progress
from argosy.observe.spans import Ring, Span, read_spans, record_spans, span
from argosy.observe.torch_hooks import (
    attach,
    attached,
    count_collective,
    install,
    install_when_imported,
    mark_waiting,
    take_over_steps,
)

__all__ = [
    "Activity",
    "Damage",
    "DamagedJournal",
    "Flag",
    "GroupProgress",
    "Journal",
    "JournalEntry",
    "Page",
    "Phase",
    "Progress",
    "Ring",
    "Span",
    "attach",
    "attached",
    "count_collective",
    "follow",
    "install",
    "install_when_imported",
    "mark_waiting",
    "read_journal",
    "read_spans",
    "record_spans",
    "span",
    "take_over_steps",
]
