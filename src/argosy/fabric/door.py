"""The door of a rank: a small listener beside its calls, which answers while an endpoint runs."""

import contextlib
from pathlib import Path

import msgspec

from argosy.core import ArgosyError, PeerLost
from argosy.fabric.link import connect

_PATIENCE_S = 0.3


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop a call of this link, or do not begin it."""

    link: int
    number: int


class AskBusy(msgspec.Struct, frozen=True, tag=True):
    """What keeps you busy?"""


class Busy(msgspec.Struct, frozen=True, tag=True):
    """The endpoint that runs, for how long, and how many calls wait. `endpoint` is empty if none runs."""

    endpoint: str
    seconds: float
    waiting: int


to_door: msgspec.msgpack.Decoder[Cancel | AskBusy] = msgspec.msgpack.Decoder(Cancel | AskBusy)
from_door: msgspec.msgpack.Decoder[Busy] = msgspec.msgpack.Decoder(Busy)


def door_path(path: Path) -> Path:
    """The door of the rank that listens at `path`."""
    return path.with_suffix(".door")


def tell_cancel(path: Path, link: int, number: int) -> None:
    """Ask a rank to stop a call; a rank that is gone has."""
    with contextlib.suppress(ArgosyError, OSError):
        door = connect(door_path(path), from_door, "a rank", timeout_s=_PATIENCE_S)
        try:
            door.send(Cancel(link, number))
        finally:
            door.close()


def ask_busy(path: Path, name: str) -> str:
    """One clause about what keeps a rank from answering."""
    try:
        door = connect(door_path(path), from_door, name, timeout_s=_PATIENCE_S)
        try:
            door.send(AskBusy())
            answer, _ = door.wait(_PATIENCE_S)
        finally:
            door.close()
    except PeerLost:
        return f"{name} does not listen"
    except (ArgosyError, OSError):
        return f"{name} does not react at all: it is stopped, or in native code that keeps the interpreter"
    if not answer.endpoint:
        return f"{name} is idle"
    return f"{name} has been in {answer.endpoint} for {answer.seconds:.1f} s, {answer.waiting} more calls wait"
