"""Vocabulary shared by every room: ids, statuses, errors. No I/O."""

from argosy.core.clock import Clock as Clock
from argosy.core.errors import ArgosyError as ArgosyError
from argosy.core.errors import ConfigError as ConfigError
from argosy.core.errors import DeadlinePassed as DeadlinePassed
from argosy.core.errors import PeerLost as PeerLost
from argosy.core.ids import ProcessId as ProcessId
from argosy.core.ids import RankId as RankId
from argosy.core.ids import format_ranks as format_ranks
from argosy.core.ids import host_label as host_label
from argosy.core.ids import parse_ranks as parse_ranks
from argosy.core.status import WaitStatus as WaitStatus
from argosy.core.status import signal_name as signal_name
