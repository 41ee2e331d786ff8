"""Keeping a run's logs bounded. It may block on the disk, so it is done in the background."""

import os
from pathlib import Path

from argosy.supervise.output.logfile import bound

FULL_BYTES = 64 << 10
"""With less than this a disk is full: a line that is written now may not fit."""


def bound_logs(logs: Path, bytes_max: int) -> list[str]:
    """Bound every log of a launch; returns what went wrong, each with its file."""
    return [
        trouble for path in sorted(logs.glob("*.*.[oe][ur][tr]")) if (trouble := bound(str(path), bytes_max).trouble)
    ]


def disk_is_full(path: Path) -> bool:
    """Whether what is written there now may be lost."""
    try:
        status = os.statvfs(path)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < FULL_BYTES
