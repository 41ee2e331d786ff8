"""A member that follows opens the segment of rank 0, or says why it does not."""

import os
from collections.abc import Generator
from contextlib import contextmanager

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore

from argosy._select import native_is_compiled
from argosy.collective.rendezvous import Meeting, MemberInfo, SegmentOffer, Superseded, meet
from argosy.core import ArgosyError, PeerLost
from argosy.fabric import host_id

MEETING = Meeting(name="0", rank=1, size=2, generation=3)


def told(pid: int, fd: int) -> HashStore:
    """A store in which rank 0, process `pid`, offers its descriptor `fd`."""
    store = HashStore()
    store.set(MEETING.key(0), msgspec.json.encode(MemberInfo(host_id(), pid, native_is_compiled)).decode())
    store.set(MEETING.key(0) + "/offer", msgspec.json.encode(SegmentOffer(fd, 1, 7)).decode())
    return store


@contextmanager
def guarded() -> Generator[int]:
    """A descriptor as rank 0 has it for moments after it let go of the segment: not even root may open it to write."""
    fd = os.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_number_that_is_a_guarded_files_by_now_is_looked_at_again():
    other = os.memfd_create("other")
    with guarded() as fd:

        def reuse() -> bool:
            return os.dup2(other, fd) != fd

        with pytest.raises(PeerLost, match="abandoned this generation"):
            meet(told(os.getpid(), fd), MEETING, 30, reuse)
        assert os.fstat(fd).st_ino == os.fstat(other).st_ino
    os.close(other)


def test_a_meeting_given_up_by_rank_0_is_given_up():
    with guarded() as fd, pytest.raises(Superseded):
        meet(told(os.getpid(), fd), MEETING, 30, lambda: True)


def test_a_process_that_may_not_be_looked_into_is_not_called_lost():
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        if os.stat("/proc/1").st_uid == os.geteuid():
            pytest.skip("process 1 is this user's own")
        with pytest.raises(ArgosyError, match="cannot be opened: /proc/1/fd/0: Permission denied") as caught:
            meet(told(1, 0), MEETING, 30)
        assert "one user" in caught.value.hint
    finally:
        if is_root:
            os.seteuid(0)
