"""How the members of a group find each other: through one key per member and generation in a store.

Each member publishes its host, its process and how much memory it can give. If all share a host, rank 0 makes the
shared segment; otherwise the members connect to each other. The store must outlive every rank, as an agent's does.
"""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from argosy._select import native_is_compiled
from argosy.collective import segment as segments
from argosy.collective.peer_links import LinkListener, own_address
from argosy.collective.segment import ABORT_ELSEWHERE, GroupSegment, Shape
from argosy.core import ArgosyError, DeadlinePassed, PeerLost, format_ranks
from argosy.fabric import host_id

Stop = Callable[[], bool]
"""Asked while waiting; True ends the wait."""
_POLL_S = 0.002
_FORBIDDEN_S = 2.0
_LOOK_S = 0.1
_LOOK_MAX = 8
"""How often, and for how many members at once, it is asked who of them is there while others are not."""


class MemberInfo(msgspec.Struct, frozen=True):
    """What a member publishes about itself."""

    host: str
    pid: int
    compiled: bool = True
    layout: str = ""
    room: int = 0
    gloo: bool = False


class SegmentOffer(msgspec.Struct, frozen=True):
    """The segment of a group, as a descriptor of rank 0."""

    fd: int
    window: int
    inode: int = 0
    failure: str = ""


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part in forming one generation of a group."""

    name: str
    rank: int
    size: int
    generation: int
    layout: str = ""
    room: int = segments.ROOM_BYTES
    gloo: bool = False
    """Links and Gloo are wanted although all may share a host."""

    def key(self, rank: int) -> str:
        # torchrun keeps one store across its restarts: the keys of an earlier attempt must not be read.
        foreign = "ARGOSY_RUN" not in os.environ
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if foreign else "0"
        return f"argosy/{attempt}.{self.generation}/{rank}"


def wants_gloo() -> bool:
    """Whether the environment asks for Gloo although ranks may share a host: ARGOSY_COLLECTIVES=gloo."""
    return os.environ.get("ARGOSY_COLLECTIVES") == "gloo"


class Superseded(ArgosyError):
    """This generation was abandoned, because a newer one is being formed."""


def meet(
    store: Any, meeting: Meeting, timeout_s: float, give_up: Stop | None = None
) -> tuple[list[MemberInfo], GroupSegment | dict[int, socket.socket]]:
    """Return all members, and the group's segment or, if they do not share a host, links to the peers.

    Raises:
        PeerLost: a member died meanwhile.
        DeadlinePassed: some members did not join in time.
        Superseded: `give_up` returned True.
        ArgosyError: the bucket layouts of the members differ, or they cannot reach each other.
    """
    return _Attempt(store, meeting, timeout_s, give_up).meet()


class _Attempt:
    """One rank's attempt to form a generation. Each of its waits may last `timeout_s`."""

    def __init__(self, store: Any, meeting: Meeting, timeout_s: float, give_up: Stop | None) -> None:
        self._store, self._meeting, self._timeout_s, self._give_up = store, meeting, timeout_s, give_up
        self._known: dict[int, MemberInfo] = {}
        self._deadline = time.monotonic() + timeout_s

    def meet(self) -> tuple[list[MemberInfo], GroupSegment | dict[int, socket.socket]]:
        meeting = self._meeting
        own = MemberInfo(host_id(), os.getpid(), native_is_compiled, meeting.layout, meeting.room, meeting.gloo)
        self._store.set(meeting.key(meeting.rank), msgspec.json.encode(own))
        members = self._members()
        _check(members)
        if len({member.host for member in members}) > 1 or any(member.gloo for member in members):
            return members, self._link()
        return members, self._lead(members) if meeting.rank == 0 else self._follow(members[0])

    def _members(self) -> list[MemberInfo]:
        ranks = range(self._meeting.size)
        look_at = time.monotonic() + _LOOK_S
        while not self._are_all_known():
            if time.monotonic() >= look_at:  # Of those who are there it can be seen that they die.
                self._learn(_LOOK_MAX)
                look_at = time.monotonic() + _LOOK_S
            self._pause()
        return [self._known[rank] for rank in ranks]

    def _are_all_known(self) -> bool:
        """Whether all have said who they are; what a rank said may be gone by the time it is read, if it dies."""
        if self._store.check([self._meeting.key(rank) for rank in range(self._meeting.size)]):
            self._learn(self._meeting.size)
        return len(self._known) == self._meeting.size

    def _learn(self, count: int) -> None:
        """Ask for up to `count` members that are not known yet."""
        for rank in [rank for rank in range(self._meeting.size) if rank not in self._known][:count]:
            if self._store.check([self._meeting.key(rank)]):
                self._known[rank] = msgspec.json.decode(self._store.get(self._meeting.key(rank)), type=MemberInfo)

    def _lead(self, members: list[MemberInfo]) -> GroupSegment:
        """Make the segment, and keep its descriptor open until all members have opened it."""
        meeting, offer_key = self._meeting, self._meeting.key(0) + "/offer"
        window = segments.window_for(min(member.room for member in members))
        try:
            fd = segments.create(meeting.size, window)
        except ArgosyError as error:
            self._store.set(offer_key, msgspec.json.encode(SegmentOffer(-1, window, failure=str(error))))
            raise
        try:
            segment = GroupSegment(fd, Shape(meeting.size, window), 0)
            self._store.set(offer_key, msgspec.json.encode(SegmentOffer(fd, window, os.fstat(fd).st_ino)))
            try:
                self._wait_for([meeting.key(rank) + "/open" for rank in range(1, meeting.size)])
            except BaseException as error:  # Members that have opened it must not wait for this rank.
                segment.abort(ABORT_ELSEWHERE, f"rank 0 did not join: {type(error).__name__}")
                raise
            return segment
        finally:
            os.close(fd)

    def _follow(self, leader: MemberInfo) -> GroupSegment:
        meeting, offer_key = self._meeting, self._meeting.key(0) + "/offer"
        self._wait_for([offer_key])
        offer = msgspec.json.decode(self._store.get(offer_key), type=SegmentOffer)
        if offer.failure:
            raise ArgosyError(f"rank 0: {offer.failure}")
        where, shape = (leader.pid, offer.fd, offer.inode), Shape(meeting.size, offer.window)
        until = time.monotonic() + _FORBIDDEN_S
        while True:
            try:
                segment = segments.open_peer_segment(where, shape, meeting.rank)
            except PermissionError as error:
                if time.monotonic() > until:
                    raise ArgosyError(
                        f"rank 0's shared memory cannot be opened: {error.filename}: {error.strerror}",
                        hint="run all ranks as one user with the same capabilities, and none of them as undumpable",
                    ) from error
                self._pause()
            else:
                self._store.set(meeting.key(meeting.rank) + "/open", b"1")
                return segment

    def _link(self) -> dict[int, socket.socket]:
        listener, rank = LinkListener(own_address(self._store)), self._meeting.rank
        keys = [self._meeting.key(peer) + "/address" for peer in range(self._meeting.size)]
        self._store.set(keys[rank], listener.address)
        self._wait_for(keys)
        return listener.link(rank, [self._store.get(key).decode() for key in keys], self._pause)

    def _wait_for(self, keys: list[str]) -> None:
        self._deadline = time.monotonic() + self._timeout_s
        while keys and not self._store.check(keys):
            self._pause()

    def _pause(self) -> None:
        """Sleep a moment, or raise if the attempt cannot succeed any more."""
        meeting, host = self._meeting, host_id()
        if self._give_up is not None and self._give_up():
            raise Superseded(f"generation {meeting.generation} of group {meeting.name} was superseded")
        for rank, member in self._known.items():
            if member.host == host and not _alive(member.pid):
                raise PeerLost(f"rank {rank}", f"it died while generation {meeting.generation} was formed")
        if time.monotonic() > self._deadline:
            self._learn(meeting.size)
            missing = format_ranks(rank for rank in range(meeting.size) if rank not in self._known)
            what = f"ranks {missing} of {meeting.size} did not join group {meeting.name}"
            raise DeadlinePassed(what, self._timeout_s)
        time.sleep(_POLL_S)


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def _check(members: list[MemberInfo]) -> None:
    if len({member.compiled for member in members}) > 1:
        raise ArgosyError("some ranks have Argosy's compiled extension and some do not")
    layouts = {member.layout for member in members if member.layout}
    if len(layouts) > 1:
        by_layout = {text: [r for r, member in enumerate(members) if member.layout == text] for text in layouts}
        said = "; ".join(f"ranks {format_ranks(ranks)}: {text}" for text, ranks in sorted(by_layout.items()))
        raise ArgosyError(
            f"the DDP bucket layouts of the ranks differ: {said}", hint="let every rank rehearse a step before it joins"
        )
