"""`python -m argosy.data.inspect`: a source seen before a training sees it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


def inspect(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "argosy.data.inspect", *words, "--seconds", "0.05"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def write_sources(directory: Path) -> None:
    np.arange(10_001, dtype=np.uint16).tofile(directory / "train.bin")
    (directory / "train.jsonl").write_text("".join(json.dumps({"n": number}) + "\n" for number in range(300)))
    (directory / "mine.py").write_text(
        "import numpy\nfrom argosy.data import Mix, Pack, Shards\n"
        "data = numpy.zeros((77, 4))\ndef make(): return [1, 2, 3]\n"
        "mix = Mix([list(range(100)), list(range(50))], [3, 1])\n"
        "packed = Pack([numpy.arange(n % 37 + 1) for n in range(500)], 64)\n"
        "shards = Shards(lambda shard, shards, epoch: iter(range(shard, 1000, shards)), 8)\n"
        "bad = type('Bad', (list,), {'__getitem__': lambda self, i: 1 / 0})([1, 2])\n"
    )


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (["train.bin", "--length", "100"], 100),
        (["train.jsonl"], 300),
        (["mine:data"], 77),
        (["mine:make"], 3),
        (["mine:mix"], "100 + 50"),
        (["mine:packed"], "500 sequences, 9,329 tokens in rows of 64"),
        (["mine:shards"], "unknown: an iterable in 8 shards"),
    ],
)
def test_a_source_is_described(tmp_path: Path, words: list[str], samples: object):
    write_sources(tmp_path)
    said = inspect(tmp_path, *words)
    assert said.returncode == 0, said.stderr
    lines = dict(line.split(None, 1) for line in said.stdout.splitlines())
    assert lines["samples"] == str(samples)
    assert "begins" in said.stdout
    assert {"samples/s,", "MB/s,"} <= set(said.stdout.split())
    assert "time goes to" in said.stdout


@pytest.mark.parametrize("name", ["nowhere.bin", "what.csv", "mine:nothing", "mine:bad"])
def test_what_is_no_source_is_said(tmp_path: Path, name: str):
    write_sources(tmp_path)
    said = inspect(tmp_path, name)
    assert said.returncode == 2
    assert said.stderr.startswith("argosy: ")
    assert name.split(":")[0] in said.stderr or "ZeroDivisionError" in said.stderr
    assert "Traceback" not in said.stderr
