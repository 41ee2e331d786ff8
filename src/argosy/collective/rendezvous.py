"""How the members of a group find each other: one key per member and generation in torch's store.

Each member says on which host it is and which process; the first of them also offers the shared segment. The
store must outlive every rank, as an agent's does.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from argosy._select import native_is_compiled
from argosy.collective import segment as segments
from argosy.collective.segment import ABORT_ELSEWHERE, Segment
from argosy.core import ArgosyError, DeadlinePassed, PeerLost, format_ranks

_POLL_S = 0.002


class Hello(msgspec.Struct, frozen=True):
    """What a member says of itself."""

    host: str
    pid: int
    fd: int = -1
    compiled: bool = True
    layout: str = ""


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Who meets where."""

    name: str
    rank: int
    size: int
    generation: int
    layout: str = ""

    def key(self, rank: int) -> str:
        # torchrun keeps one store over its restarts: what an earlier attempt wrote must not be read.
        foreign = "ARGOSY_RUN" not in os.environ
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if foreign else "0"
        return f"argosy/{attempt}.{self.generation}/{rank}"


class Superseded(ArgosyError):
    """The meeting was given up: a newer generation is being formed."""


def host_id() -> str:
    """The same for processes that can open each other's files under /proc: one kernel, one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}:{os.getuid()}"


def meet(
    store: Any, meeting: Meeting, timeout_s: float, give_up: Callable[[], bool] | None = None
) -> tuple[list[Hello], Segment | None]:
    """Exchange hellos; return them with the group's segment, or None if the members share no host.

    Raises:
        PeerLost: a member died meanwhile.
        DeadlinePassed: some did not come.
        Superseded: `give_up` said so.
        ArgosyError: the layouts of the members differ.
    """
    leader = meeting.rank == 0
    fd = segments.create(meeting.size) if leader else -1
    try:
        own = Hello(host_id(), os.getpid(), fd, native_is_compiled, meeting.layout)
        store.set(meeting.key(meeting.rank), msgspec.json.encode(own))
        hellos = _hellos(store, meeting, timeout_s, give_up)
        _check(meeting, hellos)
        if len({hello.host for hello in hellos}) > 1:
            return hellos, None
        first = hellos[0]
        if leader:
            segment = Segment(fd, meeting.size, 0)
        else:
            segment = segments.open_of(first.pid, first.fd, meeting.size, meeting.rank, "rank 0")
        # The leader may close its descriptor, and die, only when all have opened it.
        try:
            store.set(meeting.key(meeting.rank) + "/open", b"1")
            if leader:
                _await_open(store, meeting, hellos, timeout_s, give_up)
        except BaseException as error:  # those who have it already must not wait for this rank
            segment.abort(ABORT_ELSEWHERE, f"rank {meeting.rank} did not join: {type(error).__name__}")
            raise
        return hellos, segment
    finally:
        if fd >= 0:
            os.close(fd)


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


def _await_open(
    store: Any, meeting: Meeting, hellos: list[Hello], timeout_s: float, give_up: Callable[[], bool] | None
) -> None:
    keys = [meeting.key(rank) + "/open" for rank in range(meeting.size)]
    known, deadline = dict(enumerate(hellos)), time.monotonic() + timeout_s
    while not store.check(keys):
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
    layouts = {hello.layout for hello in hellos}
    if len(layouts) > 1:
        by_layout = {text: [r for r, hello in enumerate(hellos) if hello.layout == text] for text in layouts}
        said = "; ".join(f"ranks {format_ranks(ranks)}: {text or 'none'}" for text, ranks in sorted(by_layout.items()))
        raise ArgosyError(
            f"ranks lay out their gradient buckets differently: {said}",
            hint="let the newcomer rehearse two steps before it joins",
        )
