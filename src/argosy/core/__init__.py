"""Vocabulary shared by every room: ids, statuses, errors. No I/O."""

from argosy.core.errors import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.core.ids import RankId, format_ranks, parse_ranks
from argosy.core.status import WaitStatus, signal_name

__all__ = [
    "ArgosyError",
    "ConfigError",
    "DeadlinePassed",
    "PeerLost",
    "RankId",
    "WaitStatus",
    "format_ranks",
    "parse_ranks",
    "signal_name",
]
