"""What a rank tells about itself while it runs: progress page, spans, journal, torch hooks.

This door imports neither torch nor numpy; the hooks arrive in torch when torch arrives.
"""

from argosy.observe.hooks import (
    attach,
    attached,
    count_collective,
    install,
    install_when_imported,
    mark_waiting,
    own_steps,
)
from argosy.observe.journal import Damage, DamagedJournal, Entry, Journal, follow, read_journal
from argosy.observe.page import Page
from argosy.observe.progress import Doing, Flag, GroupProgress, Phase, Progress
from argosy.observe.spans import Ring, Span, read_spans, record_spans, span

__all__ = [
    "Damage",
    "DamagedJournal",
    "Doing",
    "Entry",
    "Flag",
    "GroupProgress",
    "Journal",
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
    "own_steps",
    "read_journal",
    "read_spans",
    "record_spans",
    "span",
]
