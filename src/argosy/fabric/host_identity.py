"""Identify the host of this process: equal ids mean that two processes can reach each other's memory and files."""

import os
from functools import cache
from pathlib import Path


def host_id() -> str:
    """Equal for processes that can open each other's files under /proc: one kernel, user and set of namespaces.

    Ranks on virtual hosts of one machine are told apart by the names of these.
    """
    return f"{_boot()}:{_namespace('pid')}:{_namespace('user')}:{os.getuid()}{os.environ.get('ARGOSY_HOST', '')}"


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except FileNotFoundError:  # A kernel without namespaces.
        return kind
