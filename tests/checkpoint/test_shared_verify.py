"""Ranks of a host verify each stored chunk once, for all of them."""

import json
import random
from pathlib import Path

import forked_calls
import msgspec

from argosy.checkpoint.format import Entry
from argosy.checkpoint.shared_verify import reads_of, sharing_ranks, verified_by
from argosy.checkpoint.step_index import all_chunks
from argosy.fabric import host_id
from argosy.transfer import Box, Layout, Member, Piece, held, replicated, whole

STATE_BYTES = 6 * 4 * 1024 * 1024
NEEDED = {"rows": 1, "columns": 3, "replicas": 3}
"""How many of three ranks need each chunk."""


def test_each_byte_is_verified_by_one_rank_of_the_host(tmp_path: Path):
    script = Path(__file__).parent / "scripts/shared.py"
    answers = [json.loads(said) for said in forked_calls.run(script.read_text(), tmp_path / "run", ranks=3)]
    for way, needed in NEEDED.items():
        # Verified once, then read by who needs it; each rank reads some small files besides.
        least = (1 + needed) * STATE_BYTES
        assert least <= sum(answer[way] for answer in answers) < least + STATE_BYTES / 2, way


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


def targets_of(stored: list[Entry], layout: Layout | None = None) -> dict[str, Member]:
    return {e.name: Member("parameter", "parameter", "F32", layout or replicated(e.shape)) for e in stored}


def test_every_chunk_that_somebody_needs_is_verified_by_exactly_one_who_needs_it():
    for seed in range(20):
        dice = random.Random(seed)
        rows = dice.choice([10, 40_000, 100_000])
        stored, ranks = entries(dice.randint(1, 40), rows), range(dice.randint(2, 5))
        pieces: list[Piece] = []
        for rank in ranks:
            first = dice.randrange(rows)
            pieces.append(Piece(rank, Box((first, 0), (dice.randint(1, rows - first), 64)), 0, (64, 1)))
        targets = targets_of(stored, Layout((rows, 64), tuple(pieces)))
        seen: dict[tuple[str, int], int] = {}
        needed: set[tuple[str, int]] = set()
        for rank in ranks:
            wanted = [c for c in all_chunks(stored) if any(p.box & c[1] for p in held(targets[c[0].name], rank))]
            needed |= {(entry.name, offset) for entry, _, offset, _ in wanted}
            for entry, _, offset, _ in verified_by(rank, wanted, targets, ranks):
                seen[entry.name, offset] = seen.get((entry.name, offset), 0) + 1
        assert seen == dict.fromkeys(needed, 1)


def test_what_is_a_ranks_own_it_verifies_itself():
    chunks = all_chunks(entries(1, 10))
    assert verified_by(1, chunks, {}, [0, 1]) == chunks


def test_ranks_of_other_hosts_or_with_other_names_do_not_share():
    stored = entries(2, 10)
    renamed = [msgspec.structs.replace(stored[0], name="v"), stored[1]]
    other = targets_of(stored, replicated((10, 64), (0, 1)))
    digests = [reads_of("x", stored, targets_of(stored)), reads_of("x", renamed, targets_of(renamed))]
    assert len({*digests, reads_of("y", stored, targets_of(stored)), reads_of("x", stored, other)}) == 4
    said = [f"{host_id()} a", "elsewhere a", f"{host_id()} a", f"{host_id()} b", f"{host_id()} "]
    assert sharing_ranks(lambda _: said, 0, "a") == [0, 2]
    assert sharing_ranks(lambda _: said, 3, "b") == [3]
    assert sharing_ranks(lambda _: [f"{host_id()} "] * 2, 1, "") == [1]
