"""The control socket of a rank: cancels calls and reports what runs, while the main loop is busy with an endpoint.

Calls and their replies go through the other socket (`server.py`).
"""

from contextlib import closing, suppress
from pathlib import Path

import msgspec

from argosy.core import ArgosyError, PeerLost
from argosy.fabric.link import connect

_TIMEOUT_S = 0.3


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """Stop call `number` of link `link`, or do not begin it."""

    link: int
    number: int


class AskCurrentCall(msgspec.Struct, frozen=True, tag=True):
    """Ask which endpoint runs; answered by `CurrentCall`."""


class CurrentCall(msgspec.Struct, frozen=True, tag=True):
    """The endpoint that runs (empty if none), for how long, and how many calls wait behind it."""

    endpoint: str
    seconds: float
    waiting: int


ToControl = CancelCall | AskCurrentCall
control_decoder: msgspec.msgpack.Decoder[ToControl] = msgspec.msgpack.Decoder(ToControl)
reply_decoder: msgspec.msgpack.Decoder[CurrentCall] = msgspec.msgpack.Decoder(CurrentCall)


def control_path(path: Path) -> Path:
    """The control socket of the rank that listens at `path`."""
    return path.with_suffix(".ctrl")


def send_cancel(path: Path, link: int, number: int) -> None:
    """Ask a rank to stop a call. Nothing is raised if the rank is gone."""
    with (
        suppress(ArgosyError, OSError),
        closing(connect(control_path(path), reply_decoder, "a rank", timeout_s=_TIMEOUT_S)) as control,
    ):
        control.send(CancelCall(link, number))


def explain_silence(path: Path, name: str) -> str:
    """Say in one clause why a rank does not answer a call."""
    try:
        with closing(connect(control_path(path), reply_decoder, name, timeout_s=_TIMEOUT_S)) as control:
            control.send(AskCurrentCall())
            answer, _ = control.wait(_TIMEOUT_S)
    except PeerLost:
        return f"{name} does not listen"
    except (ArgosyError, OSError):
        return f"{name} does not respond: the process is stopped, or native code holds the GIL"
    if not answer.endpoint:
        return f"{name} is idle"
    return f"{name} has been in {answer.endpoint} for {answer.seconds:.1f} s, {answer.waiting} more calls wait"
