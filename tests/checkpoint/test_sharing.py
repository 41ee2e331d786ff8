"""Ranks of a host read each stored byte once, and put it into each other's memory."""

import ctypes
import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
from seeds import each
from warm import warm

from argosy.checkpoint.format import Entry
from argosy.checkpoint.reading import all_chunks
from argosy.checkpoint.sharing import Offer, Place, Sharing, Table, divided, groups, reads_of, run_of
from argosy.fabric import host_id
from argosy.transfer import Box, whole

STATE_BYTES = 6 * 4 * 1024 * 1024


def test_each_byte_is_read_by_one_rank_of_the_host(tmp_path: Path):
    script = Path(__file__).parent / "scripts/shared.py"
    env = os.environ | {"WORLD_SIZE": "3", "RENDEZVOUS": str(tmp_path / "store"), "OMP_NUM_THREADS": "1"}
    command = [*warm(), str(script), str(tmp_path / "run")]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(3)
    ]
    answers = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    for way in ("rows", "columns", "replicas"):
        # Verified, then read; each rank reads some small files besides.
        assert 2 * STATE_BYTES <= sum(answer[way] for answer in answers) < 2.5 * STATE_BYTES, way


def entries(count: int, rows: int) -> list[Entry]:
    box = whole((rows, 64))
    size = box.cells * 4
    sums = ["0" * 32] * -(-size // (8 << 20))
    return [
        Entry(
            name=f"w{i}", key="parameter", unit=f"w{i}", role="parameter", dtype="F32", shape=box.shape, box=box,
            file="step/rank-00000.safetensors", offset=4096 + i * size, sums=sums,
        )
        for i in range(count)
    ]  # fmt: skip


@each("seed", range(20))
def test_every_chunk_that_somebody_needs_has_exactly_one_reader_who_needs_it(seed: int):
    dice = random.Random(seed)
    rows = dice.choice([10, 40_000, 100_000])
    stored = entries(dice.randint(1, 40), rows)
    chunks = all_chunks(stored)
    tables: dict[int, Table] = {}
    for rank in range(dice.randint(2, 5)):
        table: Table = {}
        for entry in stored:
            first = dice.randrange(rows)
            box = Box((first, 0), (dice.randint(1, rows - first), 64))
            if dice.random() < 0.8:
                table[entry.name] = [Place(box, 1 << 20, (64, 1))]
        tables[rank] = table
    read: dict[tuple[str, int], list[int]] = {}
    for rank, table in tables.items():
        wanted = [c for c in chunks if any(place.box & c[1] for place in table.get(c[0].name, ()))]
        mine, receivers = divided(wanted, rank, tables)
        for entry, _, offset, _ in mine:
            read.setdefault((entry.name, offset), []).append(rank)
            receives = set(receivers[entry.file, offset]) | {rank}
            needs = {
                other
                for other in tables
                if any(p.box & b for _, b, o, _ in wanted if o == offset for p in tables[other].get(entry.name, ()))
            }
            assert receives == needs
    needed = {(c[0].name, c[2]) for c in chunks for t in tables.values() for p in t.get(c[0].name, ()) if p.box & c[1]}
    assert {place: len(readers) for place, readers in read.items()} == dict.fromkeys(needed, 1)


def test_what_a_rank_did_not_offer_it_reads_itself():
    stored = entries(1, 10)
    tables: dict[int, Table] = {0: {"w0": [Place(whole((10, 64)), 0, (64, 1))]}, 1: {}}
    chunks = all_chunks(stored)
    assert divided(chunks, 1, tables) == (chunks, {})
    assert divided(chunks, 0, tables) == (chunks, {(stored[0].file, stored[0].offset): []})


def test_runs_are_what_is_contiguous_on_both_sides():
    assert run_of(whole((8, 64)), (64, 1), (8, 64)) == 512
    assert run_of(Box((0, 0), (8, 32)), (32, 1), (8, 64)) == 32
    assert run_of(Box((2, 0), (3, 64)), (64, 1), (8, 64)) == 192
    assert run_of(whole((8, 64)), (1, 8), (8, 64)) == 1  # Transposed where it goes.
    assert run_of(whole(()), (), ()) == 1


def test_ranks_of_other_hosts_or_with_other_names_do_not_share():
    here, there = Offer("a", "x", 1, 0, 0, 0), Offer("b", "x", 2, 0, 0, 0)
    other = Offer("a", "y", 3, 0, 0, 0)
    assert groups([here, there, here, None, other]) == {0: [0, 2], 2: [0, 2]}
    stored = entries(2, 10)
    renamed = [msgspec.structs.replace(stored[0], name="v"), stored[1]]
    assert len({reads_of("x", stored), reads_of("x", renamed), reads_of("y", stored)}) == 3


def test_if_one_cannot_reach_another_each_reads_for_itself():
    gone = subprocess.Popen(["true"])
    gone.wait()
    stored = entries(1, 10)
    said: list[str] = []

    def exchange(text: str) -> list[str]:
        said.append(text)
        if len(said) == 1:
            return [
                text,
                msgspec.json.encode(Offer(host_id(), reads_of("x", stored), gone.pid, 4096, 4096, 10)).decode(),
            ]
        return [text, "yes"]

    sharing = Sharing(0)
    sharing.agree(exchange, reads_of("x", stored), {"w0": [Place(whole((10, 64)), 0, (64, 1))]})
    assert said[1] == "no"
    assert sharing.is_any
    assert not sharing.partners
    chunks = all_chunks(stored)
    assert sharing.divided(chunks) == (chunks, {})
    sharing.close()


def test_an_offer_says_where_the_table_is():
    said: list[str] = []

    def exchange(text: str) -> list[str]:
        said.append(text)
        return [text, "null"]

    sharing = Sharing(0)
    table: Table = {"w0": [Place(whole((10, 64)), 4096, (64, 1))]}
    sharing.agree(exchange, "x", table)
    offer = msgspec.json.decode(said[0], type=Offer)
    assert msgspec.json.decode(ctypes.string_at(offer.address, offer.bytes), type=Table) == table
    assert not sharing.is_any
    assert len(said) == 1


WRITER = """
import ctypes, os, sys
from argosy._select import native
pid, gate, to = map(int, sys.argv[1:])
count, own = ctypes.c_uint64(), ctypes.create_string_buffer(b"x" * 8)
pidfd = os.pidfd_open(pid)
row = (pid, pidfd, gate, ctypes.addressof(count), ctypes.addressof(own), to, 0, 8, 1, 1, 1, *[0] * 9)
for _ in sys.stdin:
    try:
        native.write_memory(b"".join(value.to_bytes(8, "little") for value in row))
        print("written", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


def test_h3_nobody_writes_to_a_rank_that_left():
    memory = (ctypes.c_char * 8)()
    offers: list[Offer] = []
    sharing = Sharing(0)

    def exchange(text: str) -> list[str]:
        if text == "yes":
            return [text, "yes"]
        offers.append(msgspec.json.decode(text, type=Offer))
        return [text, text]  # As a second rank in this very process.

    sharing.agree(exchange, "x", {})
    command = [sys.executable, "-c", WRITER, str(os.getpid()), str(offers[0].words), str(ctypes.addressof(memory))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write("now\n")
        assert writer.stdout.readline() == "written\n"
        assert memory.raw == b"x" * 8
        memory.raw = bytes(8)
        sharing.leave()
        sharing.close()
        writer.stdin.write("now\n")
        assert writer.stdout.readline() == f"{errno.ECANCELED}\n"
        assert memory.raw == bytes(8)
        writer.stdin.close()
