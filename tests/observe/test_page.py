"""The progress page keeps its promises P1-P3."""

import os
import random
import resource
import struct
from pathlib import Path

import pytest
from seeds import each

from argosy.observe import Flag, GroupProgress, Page, Phase, RankProgress


def test_a_reader_sees_what_the_rank_wrote(tmp_path: Path):
    page = Page.create(tmp_path / "page")
    page.claim()
    page.set_phase(Phase.USER)
    page.set_flag(Flag.STACKS)
    page.step()
    index = page.add_group("world", 4, 1, range(4))
    page.issue(index, b"all_reduce", b"data.py:41")
    page.issue(index, b"send", b"pipe.py:7", p2p=True)
    page.wait(index)
    seen = Page.open(tmp_path / "page").read()
    assert seen is not None
    assert (seen.pid, seen.phase, seen.steps, seen.pulse) == (os.getpid(), Phase.USER, 1, 1)
    assert seen.flags == Flag.STACKS | Flag.PROCESS_GROUP
    assert not seen.has(Flag.TORCH_HOOKS)
    (group,) = seen.groups
    assert (group.name, group.size, group.group_rank, group.members()) == ("world", 4, 1, range(4))
    assert (group.issued, group.p2p, group.op, group.site) == (1, 1, "send", "pipe.py:7")
    assert group.waiting
    assert group.waiting_since >= group.at > 0
    page.waited(index)
    after = page.read()
    assert after is not None
    assert not after.groups[0].waiting


def test_p1_a_full_filesystem_is_an_error_and_leaves_no_file(tmp_path: Path):
    """A limit on the size of files stands in for a full tmpfs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            Page.create(tmp_path / "page")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "page").exists()


def test_a_page_in_use_is_not_made_again(tmp_path: Path):
    Page.create(tmp_path / "page")
    with pytest.raises(FileExistsError):
        Page.create(tmp_path / "page")


@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_file_that_is_too_short_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "page").write_bytes(content)
    with pytest.raises(OSError, match="too short"):
        Page.open(tmp_path / "page")


@each("seed", range(50))
def test_p2_garbage_never_raises(tmp_path: Path, seed: int):
    Page.create(tmp_path / "page")
    noise = random.Random(seed)
    magic = (tmp_path / "page").read_bytes()[:8]
    head = magic if seed % 5 else noise.randbytes(8)
    (tmp_path / "page").write_bytes(head + noise.randbytes(4088))
    seen = Page.open(tmp_path / "page").read()
    assert isinstance(seen, RankProgress) if seed % 5 else seen is None
    for group in seen.groups if seen else ():
        group.members()


def test_a_rank_writes_over_garbage(tmp_path: Path):
    page = Page.create(tmp_path / "page")
    magic = (tmp_path / "page").read_bytes()[:8]
    (tmp_path / "page").write_bytes(magic + b"\xff" * 4088)
    page = Page.open(tmp_path / "page")
    page.step()
    page.beat()
    seen = page.read()
    assert seen is not None
    assert (seen.steps, seen.pulse) == (0, 0)


def test_p2_a_rank_that_died_inside_a_write_can_be_read(tmp_path: Path):
    page = Page.create(tmp_path / "page")
    index = page.add_group("world", 2, 0, range(2))
    page.issue(index, b"barrier", b"a.py:1")
    with (tmp_path / "page").open("r+b") as file:
        file.seek(256)
        (sequence,) = struct.unpack("<Q", file.read(8))
        file.seek(256)
        file.write(struct.pack("<Q", sequence + 1))
    seen = page.read()
    assert seen is not None
    assert (seen.groups[0].issued, seen.groups[0].op, seen.groups[0].torn) == (1, "barrier", True)


def test_slots_are_never_seen_half_written(tmp_path: Path):
    """The writer names the operation after its number; a reader must never see one without the other."""
    page = Page.create(tmp_path / "page")
    child = os.fork()
    if child == 0:
        own = Page.open(tmp_path / "page")
        index = own.add_group("world", 2, 0, range(2))
        for number in range(1, 200_000):
            own.issue(index, b"op%d" % number, b"line:%d" % number)
        os._exit(0)
    reads, marked, torn = 0, 0, 0
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        seen = page.read()
        for group in seen.groups if seen else ():
            reads, marked = reads + 1, marked + group.torn
            number = group.issued
            torn += number > 0 and not group.torn and (group.op, group.site) != (f"op{number}", f"line:{number}")
    assert reads - marked > 100
    assert torn == 0


def test_p3_a_forked_child_does_not_write_to_its_parents_page(tmp_path: Path):
    page = Page.create(tmp_path / "page")
    index = page.add_group("world", 2, 0, range(2))
    before = page.read()
    child = os.fork()
    if child == 0:
        page.step()
        page.beat()
        page.issue(index, b"all_reduce", b"worker.py:1")
        page.add_group("mine", 2, 0, None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert page.read() == before


def test_the_group_longest_silent_makes_room(tmp_path: Path):
    page = Page.create(tmp_path / "page")
    for number in range(40):
        page.issue(page.add_group(f"group {number}", 2, 0, None), b"barrier", b"")
    seen = page.read()
    assert seen is not None
    assert sorted(group.name for group in seen.groups) == sorted(f"group {n}" for n in range(8, 40))
    assert seen.crowded == 8


def test_long_names_keep_what_tells_them_apart(tmp_path: Path):
    page = Page.create(tmp_path / "page")
    digest = "0123456789abcdef" * 2
    for number in (1, 2):
        index = page.add_group(f"{digest}_{number}", 2, 0, None)
        page.issue(index, b"barrier", b"a_module_with_a_long_name.py:1234")
    seen = page.read()
    assert seen is not None
    first, second = seen.groups
    assert first.name != second.name
    assert first.site.endswith("long_name.py:1234")


def test_members_of_a_mesh_dimension_are_known():
    assert GroupProgress("tp", 2, first=4, stride=1).members() == range(4, 6)
    assert list(GroupProgress("dp", 3, first=1, stride=4).members() or []) == [1, 5, 9]
    assert GroupProgress("odd", 3).members() is None
