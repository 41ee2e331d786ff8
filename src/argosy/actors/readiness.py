"""When a service counts as ready: a port that answers, a line in its log, or a function that returns."""

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

_LOG_BYTES_MAX = 1 << 20


class Tcp(msgspec.Struct, frozen=True):
    """Ready when something accepts connections on this port."""

    port: int
    host: str = "127.0.0.1"

    def is_met(self, logs: Path) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=1.0):
                return True
        except OSError:
            return False


class LogLine(msgspec.Struct, frozen=True):
    """Ready when its newest output holds a line that this regular expression matches."""

    pattern: str

    def is_met(self, logs: Path) -> bool:
        generations = sorted(logs.glob("0.*.out"), key=lambda path: int(path.name.split(".")[1]))
        if not generations:
            return False
        wanted = re.compile(self.pattern, re.MULTILINE)
        for path in (generations[-1], generations[-1].with_suffix(".err")):
            if path.exists():
                with path.open("rb") as file:
                    if wanted.search(file.read(_LOG_BYTES_MAX).decode(errors="replace")):
                        return True
        return False


class Answers(msgspec.Struct, frozen=True):
    """Ready when this function returns something true instead of raising."""

    function: Callable[[], Any]

    def is_met(self, logs: Path) -> bool:
        try:
            return bool(self.function())
        except Exception:
            return False


Readiness = Tcp | LogLine | Answers
