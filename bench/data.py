"""How fast input comes: tokens, images, Parquet rows, the first batch after a resume, a large batch handed over.

    python bench/data.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

Each loader runs in a process of its own, with 0, 1 and 2 workers; what is timed begins after the first batches.
StatefulDataLoader and Grain: `python bench/peers.py --setup loaders`; mosaicml-streaming: `--setup mosaic`.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as arrow
from harness import Contender, Failed, Goal, Options, Row, run_benches
from peers import python_of
from pyarrow import parquet

from argosy.data import seed_generators
from argosy.data.permute import Permutation

SCRIPT = Path(__file__).with_name("scripts") / "data_peer.py"
PATIENCE_S = 150.0
PEERS = {"mosaic": "mosaic"}


def sample(task: str, loader: str, workers: int, directory: Path) -> float:
    python = sys.executable if loader in ("argosy", "torch") else python_of(PEERS.get(loader, "loaders"))
    words = [python, str(SCRIPT), task, loader, str(workers), str(directory)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"not within {PATIENCE_S:g} s") from None
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or ["failed"])[-1][:200])
    return float(done.stdout.split()[-1])


def contenders(task: str, loaders: Sequence[str], directory: Path, workers: Sequence[int]) -> list[Contender]:
    return [
        Contender(name=f"{loader} {count}", sample=partial(sample, task, loader, count, directory))
        for loader in loaders
        for count in workers
    ]


def copy_64_mib() -> float:
    source, target = np.ones(16 << 20, np.float32), np.ones(16 << 20, np.float32)
    began = time.perf_counter()
    for _ in range(10):
        target[...] = source
    return (time.perf_counter() - began) / 10


def permute_a_million() -> float:
    permutation, offsets = Permutation(10**9, 1), np.arange(500_000_000, 501_000_000)
    began = time.perf_counter()
    permutation.at(offsets)
    return time.perf_counter() - began


def key_a_step() -> float:
    import torch  # noqa: F401

    began = time.perf_counter()
    for step in range(1000):
        seed_generators(0, step, 0)
    return (time.perf_counter() - began) / 1000


def write_data(directory: Path) -> None:
    """128 MiB of tokens, 400 files of 100 KiB, 64,000 Parquet rows."""
    random = np.random.default_rng(0)
    random.integers(0, 50_000, 64 << 20, dtype=np.uint16).tofile(directory / "tokens.bin")
    (directory / "images").mkdir()
    for number in range(400):
        random.integers(0, 256, 100 << 10, dtype=np.uint8).tofile(directory / "images" / f"{number}.raw")
    count = 64_000
    vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(random.random(count * 256, np.float32)), 256)
    table = arrow.table({"n": arrow.array(range(count)), "v": vectors})
    parquet.write_table(table, directory / "rows.parquet", row_group_size=1000)


def make_rows(options: Options, directory: Path) -> list[Row]:
    workers = [0, 1] if options.quick else [0, 1, 2]
    some = [count for count in workers if count]
    everyone = ["argosy", "torch", "stateful", "grain", "mosaic"]
    best = f"argosy {workers[0]}"
    return [
        Row(
            key="tokens",
            title="read a million tokens from a mapped file, fully shuffled",
            contenders=contenders("tokens", everyone, directory, workers),
            base="torch 1",
            goals=[Goal(of=best, times_of=f"torch {count}", times=2.0) for count in workers],
        ),
        Row(
            key="images",
            title="read a thousand files of 100 KiB, fully shuffled",
            contenders=contenders("images", everyone, directory, workers),
            base="torch 1",
        ),
        Row(
            key="parquet",
            title="read a thousand Parquet rows of 1 KiB, row groups shuffled",
            contenders=contenders("parquet", ["argosy", "torch"], directory, workers),
            base="torch 1",
        ),
        Row(
            key="resume",
            title="first batch after a resume at 900,000,000 of 1e9 (StatefulDataLoader: a thousandth of that)",
            contenders=contenders("resume", ["argosy", "stateful"], directory, [0]),
            base="stateful 0",
            goals=[Goal(of="argosy 0", at_most=0.1)],
        ),
        Row(
            key="handover",
            title="receive a batch of 64 MiB from a worker process",
            contenders=[
                *contenders("handover", everyone[:-1], directory, some),
                Contender(name="one memcpy", sample=copy_64_mib, warm_up=True),
            ],
            base="torch 1",
            goals=[
                Goal(of="argosy 1", times_of="one memcpy", times=1 / 1.2),
                Goal(of="argosy 1", times_of="torch 1", times=3.0),
            ],
        ),
        Row(
            key="permute",
            title="compute a million indices of a permutation of 1e9",
            contenders=[Contender(name="argosy", sample=permute_a_million, warm_up=True)],
            goals=[Goal(of="argosy", at_most=1 / 3)],
        ),
        Row(
            key="keyed",
            title="seed all random generators for a step",
            contenders=[Contender(name="argosy", sample=key_a_step, warm_up=True)],
            goals=[Goal(of="argosy", at_most=20e-6)],
        ),
    ]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="argosy-bench-") as name:
        directory = Path(name)
        if "--list" not in sys.argv:
            write_data(directory)
        return run_benches("Measure how fast input comes.", lambda options: make_rows(options, directory))


if __name__ == "__main__":
    sys.exit(main())
