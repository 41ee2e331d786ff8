"""The client's end of a tunnel to a rank on another host: standard input there, its output here."""

import os
import select
from collections.abc import Callable
from contextlib import suppress

from argosy.core import ConfigError, PeerLost
from argosy.supervise import OpenTunnel, Refused, TunnelClosed, TunnelData, TunnelTook, reach_agent

PIECE = 1 << 15


def run_tunnel(message: OpenTunnel, put: Callable[[int, bytes], None], *, stdin: bool = True) -> int:
    """Until the other end is closed; returns its exit code. `put` gets pieces of its streams 1 and 2.

    Raises:
        ConfigError: the rank cannot be reached, or the program not be executed.
        PeerLost: the agent is gone.
    """
    link = reach_agent()
    try:
        link.send(message)
        may_send = ended = False  # What is read here would be lost if there is nobody to take it.
        while True:
            sources = [link.fileno(), *([0] if stdin and may_send else [])]
            ready = [link.fileno()] if link.has_messages else select.select(sources, [], [])[0]
            if 0 in ready:
                data = os.read(0, PIECE)
                link.send(TunnelData(0, data))
                stdin, may_send, ended = bool(data), False, not data
            if link.fileno() not in ready:
                continue
            for answer, _ in link.receive():
                match answer:
                    case TunnelData(stream, data):
                        put(stream, data)
                        link.send(TunnelTook(stream))
                    case TunnelTook():
                        may_send = True
                        if not stdin and not ended:
                            ended = True
                            link.send(TunnelData(0, b""))
                    case TunnelClosed(code, reason):
                        if reason:
                            raise ConfigError(reason)
                        return code
                    case Refused(reason, hint):
                        raise ConfigError(reason, hint=hint)
                    case _:
                        pass
    finally:
        with suppress(PeerLost):
            link.close()


def put_out(stream: int, data: bytes) -> None:
    """Write to the same stream of this process."""
    view = memoryview(data)
    while view:
        view = view[os.write(stream, view) :]
