"""The environment of a run with its secrets, sealed in memory and passed on as a descriptor.

The agent forwards the descriptor without reading it, so that a secret is never in its log or messages.
"""

import fcntl
import os
from collections.abc import Mapping

import msgspec

_F_ADD_SEALS = 1033
_SEALS = 0x0002 | 0x0004 | 0x0008  # shrink, grow, write


class Sealed(msgspec.Struct, frozen=True):
    """Variables as given, and the secret ones apart."""

    variables: dict[str, str]
    secrets: dict[str, str]


def seal_environment(variables: Mapping[str, str], secrets: Mapping[str, str]) -> int:
    """Write both to a memory file that nobody can change any more; returns its descriptor."""
    fd = os.memfd_create("argosy-environment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # As bytes: names and values may hold what no text encoding can carry.
    content = msgspec.msgpack.encode(
        [[(os.fsencode(n), os.fsencode(v)) for n, v in part.items()] for part in (variables, secrets)]
    )
    _write_all(fd, content)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


def open_environment(fd: int) -> Sealed:
    """Read what `seal_environment` wrote; the descriptor stays open."""
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    parts = msgspec.msgpack.decode(content, type=list[list[tuple[bytes, bytes]]])
    variables, secrets = ({os.fsdecode(n): os.fsdecode(v) for n, v in part} for part in parts)
    return Sealed(variables, secrets)


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
