"""How the members of a group find each other: one key per member and generation in torch's store.

Each member says on which host it is, which process, and how much memory it can give; if all share a host, the first
of them then makes the shared segment, else they connect to each other. The store must outlive every rank, as an
agent's does.
"""

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from argosy._select import native_is_compiled
from argosy.collective import segment as segments
from argosy.collective.links import Door, own_address
from argosy.collective.segment import ABORT_ELSEWHERE, Segment, Shape
from argosy.core import ArgosyError, DeadlinePassed, PeerLost, format_ranks
from argosy.fabric import host_id

_POLL_S = 0.002
_FORBIDDEN_S = 2.0


class Hello(msgspec.Struct, frozen=True):
    """What a member says of itself."""

    host: str
    pid: int
    compiled: bool = True
    layout: str = ""
    room: int = 0


class Offer(msgspec.Struct, frozen=True):
    """The segment of a group: a descriptor of its first member."""

    fd: int
    window: int
    inode: int = 0
    failure: str = ""


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Who meets where."""

    name: str
    rank: int
    size: int
    generation: int
    layout: str = ""
    room: int = segments.ROOM_BYTES

    def key(self, rank: int) -> str:
        # torchrun keeps one store over its restarts: what an earlier attempt wrote must not be read.
        foreign = "ARGOSY_RUN" not in os.environ
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if foreign else "0"
        return f"argosy/{attempt}.{self.generation}/{rank}"


class Superseded(ArgosyError):
    """The meeting was given up: a newer generation is being formed."""


def meet(
    store: Any, meeting: Meeting, timeout_s: float, give_up: Callable[[], bool] | None = None
) -> tuple[list[Hello], Segment | dict[int, socket.socket]]:
    """Exchange hellos; return them with the group's segment, or with links to the peers if they share no host.

    Raises:
        PeerLost: a member died meanwhile.
        DeadlinePassed: some did not come.
        Superseded: `give_up` said so.
        ArgosyError: the layouts of the members differ, or they cannot reach each other.
    """
    own = Hello(host_id(), os.getpid(), native_is_compiled, meeting.layout, meeting.room)
    store.set(meeting.key(meeting.rank), msgspec.json.encode(own))
    hellos = _hellos(store, meeting, timeout_s, give_up)
    _check(meeting, hellos)
    wait = partial(_await, store, meeting, hellos, timeout_s, give_up)
    look = partial(_look, meeting, dict(enumerate(hellos)), time.monotonic() + timeout_s, timeout_s, give_up)
    if len({hello.host for hello in hellos}) > 1:
        return hellos, _link(store, meeting, wait, look)
    if meeting.rank == 0:
        return hellos, _lead(store, meeting, hellos, wait)
    return hellos, _follow(store, meeting, hellos, wait, look)


def _lead(store: Any, meeting: Meeting, hellos: list[Hello], wait: Callable[[list[str]], None]) -> Segment:
    """Make the segment; it may be let go of only when all have opened it."""
    window = segments.window_for(min(hello.room for hello in hellos))
    try:
        fd = segments.create(meeting.size, window)
    except ArgosyError as error:
        store.set(meeting.key(0) + "/offer", msgspec.json.encode(Offer(-1, window, failure=str(error))))
        raise
    try:
        segment = Segment(fd, Shape(meeting.size, window), 0)
        store.set(meeting.key(0) + "/offer", msgspec.json.encode(Offer(fd, window, os.fstat(fd).st_ino)))
        try:
            wait([meeting.key(rank) + "/open" for rank in range(1, meeting.size)])
        except BaseException as error:  # those who have it already must not wait for this rank
            segment.abort(ABORT_ELSEWHERE, f"rank 0 did not join: {type(error).__name__}")
            raise
        return segment
    finally:
        os.close(fd)


def _follow(
    store: Any, meeting: Meeting, hellos: list[Hello], wait: Callable[[list[str]], None], look: Callable[[], None]
) -> Segment:
    wait([meeting.key(0) + "/offer"])
    offer = msgspec.json.decode(store.get(meeting.key(0) + "/offer"), type=Offer)
    if offer.failure:
        raise ArgosyError(f"rank 0: {offer.failure}")
    where, shape = (hellos[0].pid, offer.fd, offer.inode), Shape(meeting.size, offer.window)
    until = time.monotonic() + _FORBIDDEN_S
    while True:
        try:
            segment = segments.open_of(where, shape, meeting.rank)
        except PermissionError as error:
            if time.monotonic() > until:
                raise ArgosyError(
                    f"rank 0's shared memory may not be opened: {error.filename}: {error.strerror}",
                    hint="let all ranks run as one user, with the same capabilities, and none of them set undumpable",
                ) from error
            look()
        else:
            store.set(meeting.key(meeting.rank) + "/open", b"1")
            return segment


def _link(
    store: Any, meeting: Meeting, wait: Callable[[list[str]], None], look: Callable[[], None]
) -> dict[int, socket.socket]:
    door, keys = Door(own_address(store)), [meeting.key(rank) + "/door" for rank in range(meeting.size)]
    store.set(keys[meeting.rank], door.place)
    wait(keys)
    return door.link(meeting.rank, [store.get(key).decode() for key in keys], look)


def _hellos(store: Any, meeting: Meeting, timeout_s: float, give_up: Callable[[], bool] | None) -> list[Hello]:
    keys = [meeting.key(rank) for rank in range(meeting.size)]
    known: dict[int, Hello] = {}
    deadline = time.monotonic() + timeout_s
    while len(known) < meeting.size:
        for rank, key in enumerate(keys):
            if rank not in known and store.check([key]):
                known[rank] = msgspec.json.decode(store.get(key), type=Hello)
        if len(known) == meeting.size:
            break
        _look(meeting, known, deadline, timeout_s, give_up)
    return [known[rank] for rank in range(meeting.size)]


def _await(
    store: Any,
    meeting: Meeting,
    hellos: list[Hello],
    timeout_s: float,
    give_up: Callable[[], bool] | None,
    keys: list[str],
) -> None:
    known, deadline = dict(enumerate(hellos)), time.monotonic() + timeout_s
    while keys and not store.check(keys):
        _look(meeting, known, deadline, timeout_s, give_up)


def _look(
    meeting: Meeting, known: dict[int, Hello], deadline: float, timeout_s: float, give_up: Callable[[], bool] | None
) -> None:
    """Pause, unless the meeting cannot succeed any more."""
    if give_up is not None and give_up():
        raise Superseded(f"generation {meeting.generation} of group {meeting.name} was given up")
    host = host_id()
    for rank, hello in known.items():
        if hello.host == host and not _alive(hello.pid):
            raise PeerLost(f"rank {rank}", f"it died while generation {meeting.generation} was formed")
    if time.monotonic() > deadline:
        missing = [rank for rank in range(meeting.size) if rank not in known]
        raise DeadlinePassed(
            f"ranks {format_ranks(missing)} of {meeting.size} did not join group {meeting.name}", timeout_s
        )
    time.sleep(_POLL_S)


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _check(meeting: Meeting, hellos: list[Hello]) -> None:
    if len({hello.compiled for hello in hellos}) > 1:
        raise ArgosyError("some ranks have argosy's compiled extension and some have not")
    layouts = {hello.layout for hello in hellos if hello.layout}
    if len(layouts) > 1:
        by_layout = {text: [r for r, hello in enumerate(hellos) if hello.layout == text] for text in layouts}
        said = "; ".join(f"ranks {format_ranks(ranks)}: {text}" for text, ranks in sorted(by_layout.items()))
        raise ArgosyError(
            f"ranks lay out their gradient buckets differently: {said}",
            hint="let every rank rehearse a step before it joins",
        )
