"""Inspect a source before a training: lengths, order, bytes per sample, read rate, and where the time goes.

    python -m argosy.data.inspect SOURCE [--batch N] [--shuffle full|none|blocks] [--seconds S]

SOURCE is a file or URL (.bin tokens, .jsonl, .parquet) or an object of a module, as `package.module:name`.
"""

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import click
import numpy as np

from argosy.core import ArgosyError, ConfigError
from argosy.data.choose_plan import choose_plan
from argosy.data.collate import Array, in_heap, stack
from argosy.data.jsonl import Jsonl
from argosy.data.loader import Loader
from argosy.data.microbatch import sample_error
from argosy.data.order import Shuffle
from argosy.data.pack import Pack
from argosy.data.parquet import Parquet
from argosy.data.plan import Mix, Rows, SampleReader, length_of
from argosy.data.shards import Shards
from argosy.data.tokens import Tokens


@dataclass(slots=True)
class Spent:
    """The seconds of each part of loading, and the samples and bytes loaded."""

    order_s: float = 0.0
    read_s: float = 0.0
    collate_s: float = 0.0
    samples: int = 0
    bytes: int = 0

    @property
    def total_s(self) -> float:
        return self.order_s + self.read_s + self.collate_s


def find_source(name: str, length: int, dtype: str) -> Any:
    """Open what the command line names.

    Raises:
        ConfigError: it names neither a known kind of file nor an object of a module.
    """
    if name.endswith(".bin"):
        return Tokens(name, length, dtype=np.dtype(dtype))
    if name.endswith((".jsonl", ".ndjson")):
        return Jsonl(name)
    if name.endswith(".parquet"):
        return Parquet(name)
    module, colon, attribute = name.partition(":")
    if not colon or "/" in module:
        raise ConfigError(f"neither a .bin, .jsonl or .parquet file nor module:name: {name}")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot be imported: {name}: {error}") from error
    return found() if callable(found) and not hasattr(found, "__getitem__") else found


def measure(source: Any, shuffle: Shuffle, batch: int, seconds: float) -> Spent:
    """Load batches in this process for so many seconds, and time each part."""
    plan = choose_plan(source, shuffle, 0)
    reader, spent, position = plan.reader(), Spent(), 0
    while spent.total_s < seconds:
        times = [time.perf_counter()]
        rows = plan.rows(position, batch)
        times.append(time.perf_counter())
        made = reader.gather(rows, in_heap)
        samples = None if made is not None else [_one(reader, rows, number) for number in range(reader.count(rows))]
        times.append(time.perf_counter())
        made = made if samples is None else stack(samples)
        times.append(time.perf_counter())
        for name, begin, end in zip(("order_s", "read_s", "collate_s"), times, times[1:], strict=False):
            setattr(spent, name, getattr(spent, name) + end - begin)
        spent.samples += batch
        spent.bytes += size_of(made)
        position += batch
    return spent


def _one(reader: SampleReader, rows: Rows, number: int) -> Any:
    try:
        return reader.one(rows, number)
    except Exception as error:
        raise sample_error(reader.where(rows, number), error) from error


def size_of(thing: Any) -> int:
    """Return the bytes of the arrays, tensors and texts in a batch."""
    if isinstance(thing, dict):
        return sum(size_of(value) for value in cast("dict[Any, Any]", thing).values())
    if isinstance(thing, list | tuple):
        return sum(size_of(value) for value in cast("list[Any]", thing))
    if isinstance(thing, str | bytes):
        return len(thing)
    return int(cast(Array, thing).nbytes) if hasattr(thing, "nbytes") else 0


def report(source: Any, shuffle: Shuffle, batch: int, seconds: float) -> list[tuple[str, str]]:
    """Return the lines of the report, as pairs of name and value."""
    loader = Loader(source, batch, shuffle=shuffle)
    plan = choose_plan(source, shuffle, 0)
    reader, rows = plan.reader(), plan.rows(0, 8)
    first = [reader.identity(rows, number) for number in range(min(8, reader.count(rows)))]
    preview = [f"{each.source}:{each.index}" if isinstance(source, Mix) else str(each.index) for each in first]
    spent = measure(source, shuffle, batch, seconds)
    mega = spent.bytes / 1e6
    parts = [("order", spent.order_s), ("read", spent.read_s), ("collate", spent.collate_s)]
    lines = [
        ("source", type(source).__name__),
        ("samples", length_in_words(source)),
        ("bytes per sample", f"{spent.bytes / spent.samples:,.0f} when loaded"),
        ("order", f"begins {', '.join(preview)}"),
        ("first sample", reader.where(rows, 0)),
        ("state", f"{len(json.dumps(loader.state_dict()))} bytes"),
        ("read rate", f"{spent.samples / spent.total_s:,.0f} samples/s, {mega / spent.total_s:,.1f} MB/s, one process"),
        ("time goes to", ", ".join(f"{name} {share / spent.total_s:.0%}" for name, share in parts)),
    ]
    if isinstance(source, Parquet):
        lines.insert(2, ("row groups", f"up to {source.rows_per_group:,} rows: the block size to shuffle by"))
        if shuffle == Shuffle.full():
            advice = f"a full shuffle reads a row group per sample: use Shuffle.blocks({source.rows_per_group}, 4)"
            lines.append(("advice", advice))
    return lines


def length_in_words(source: Any) -> str:
    """Describe the length of a source, as far as it is known."""
    if isinstance(source, Mix):
        return " + ".join(length_in_words(each) for each in source.sources)
    if isinstance(source, Shards):
        return f"unknown: an iterable in {source.shards} shards"
    if isinstance(source, Pack):
        tokens = int(source.lengths.sum())
        return f"{len(source.lengths):,} sequences, {tokens:,} tokens in rows of {source.length:,}"
    return f"{length_of(source):,}"


@click.command(context_settings={"show_default": True})
@click.argument("source")
@click.option("--batch", default=64, type=click.IntRange(min=1), help="Samples per batch.")
@click.option("--length", default=1024, type=click.IntRange(min=1), help="Tokens per sample of a .bin file.")
@click.option("--dtype", default="uint16", type=click.Choice(["uint16", "uint32"]), help="Tokens of a .bin file.")
@click.option(
    "--shuffle", type=click.Choice(["full", "none", "blocks"]), help="Default: blocks for Parquet, else full."
)
@click.option("--seconds", default=2.0, type=click.FloatRange(min=0.01), help="How long to read.")
def main(source: str, batch: int, length: int, dtype: str, shuffle: str | None, seconds: float) -> None:
    """Print how long SOURCE is, its order, and how fast it can be read."""
    try:
        found = find_source(source, length, dtype)
        chosen = shuffle or ("blocks" if isinstance(found, Parquet) else "full")
        size = found.rows_per_group if isinstance(found, Parquet) else batch
        order = {"full": Shuffle.full(), "none": Shuffle.none()}.get(chosen) or Shuffle.blocks(size, 4)
        for name, value in report(found, order, batch, seconds):
            click.echo(f"{name:<17} {value}")
    except ArgosyError as error:
        click.echo(f"argosy: {error}", err=True)
        if error.hint and error.hint not in str(error):
            click.echo(f"hint: {error.hint}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
