"""The environment of a run with its secrets and resource limits, sealed in memory and passed on as a descriptor.

The agent forwards the descriptor without reading it, so that a secret is never in its log or messages.
"""

import contextlib
import fcntl
import os
import resource
from collections.abc import Mapping, Sequence

import msgspec

_F_ADD_SEALS = 1033
_SEALS = 0x0002 | 0x0004 | 0x0008  # shrink, grow, write


Limit = tuple[int, int, int]
"""Resource, soft and hard limit, as setrlimit(2) has them."""


class Sealed(msgspec.Struct, frozen=True):
    """Variables as given, and the secret ones apart; the limits of whoever launched."""

    variables: dict[str, str]
    secrets: dict[str, str]
    limits: list[Limit]


def seal_environment(variables: Mapping[str, str], secrets: Mapping[str, str], limits: Sequence[Limit] = ()) -> int:
    """Write all to a memory file that nobody can change any more; returns its descriptor."""
    # As bytes: names and values may hold what no text encoding can carry.
    parts = [[(os.fsencode(n), os.fsencode(v)) for n, v in part.items()] for part in (variables, secrets)]
    return seal_content(msgspec.msgpack.encode((parts, limits)))


def seal_content(content: bytes) -> int:
    """Write what another host read from a descriptor of `seal_environment`; returns a descriptor of this host."""
    fd = os.memfd_create("argosy-environment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _write_all(fd, content)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


def sealed_content(fd: int) -> bytes:
    """What `seal_content` takes; it holds secrets."""
    return os.pread(fd, os.fstat(fd).st_size, 0)


def open_environment(fd: int) -> Sealed:
    """Read what `seal_environment` wrote; the descriptor stays open."""
    content = sealed_content(fd)
    parts, limits = msgspec.msgpack.decode(content, type=tuple[list[list[tuple[bytes, bytes]]], list[Limit]])
    variables, secrets = ({os.fsdecode(n): os.fsdecode(v) for n, v in part} for part in parts)
    return Sealed(variables, secrets, limits)


def own_limits() -> list[Limit]:
    """The limits of this process."""
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    numbers = sorted({int(getattr(resource, name)) for name in names})
    return [(number, *resource.getrlimit(number)) for number in numbers]


def take_limits(limits: Sequence[Limit]) -> None:
    """Have these limits from now on; what our own hard limit forbids, as far as it allows."""
    for number, soft, hard in limits:
        current = resource.getrlimit(number)
        if current == (soft, hard):
            continue
        try:
            resource.setrlimit(number, (soft, hard))
        except (OSError, ValueError):
            most = current[1]
            lower = soft if most == resource.RLIM_INFINITY else min(soft % (1 << 64), most)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, (lower, most))


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
