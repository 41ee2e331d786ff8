"""Make one microbatch from the rows that name its samples: the same code in the loader, its threads and its workers.

M1  A batch depends on its rows, the seed and the source alone, not on the process that makes it or on the time.
"""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from argosy.core import ConfigError
from argosy.data.collate import BatchStack, Collate, Empty
from argosy.data.errors import SampleError
from argosy.data.keyed_random import begin_sample
from argosy.data.plan import Identity, Rows, SampleReader


@dataclass(frozen=True, slots=True)
class Skip:
    """Skip samples that raise, and record them; at most `limit` in the whole training.

    Errors of other classes than `errors` still end the training. Skipped samples make a batch shorter.
    """

    limit: int = 100
    errors: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"the limit of skipped samples must be at least 1: {self.limit}")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that was skipped."""

    identity: Identity
    where: str
    error: str


@dataclass(slots=True)
class Microbatch:
    """A microbatch; `batch` is None if all of its samples were skipped."""

    batch: Any
    rows: Rows
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    extra: Any = None
    """The reader's report: see `SampleReader.report`."""


@dataclass(slots=True)
class MicrobatchRecipe:
    """Everything but the rows that a batch depends on; pickled once for all workers."""

    reader: SampleReader
    seed: int = 0
    skip: Skip | None = None
    collate: Collate | None = None
    seeded: bool = True
    """Whether each sample seeds the global generators; False where threads share them."""


def _nothing(_: int) -> None:
    return


def make_microbatch(
    recipe: MicrobatchRecipe, rows: Rows, empty: Empty, progress: Callable[[int], None] = _nothing, hint: Any = None
) -> Microbatch:
    """Make the batch; `progress` is called with the number of each sample before it is made.

    `hint` comes from the plan, for `SampleReader.prepare`.

    Raises:
        SampleError: a sample raised, and `Skip` does not cover it. Its cause is the sample's own error.
        ConfigError: the samples cannot be stacked.
    """
    reader = recipe.reader
    if hint is not None:
        reader.prepare(hint)
    if recipe.collate is None and recipe.skip is None:
        progress(0)
        try:
            batch = reader.gather(rows, empty)
        except Exception as error:
            raise sample_error(
                f"{reader.where(rows, 0)} or one of the {reader.count(rows) - 1} after it", error
            ) from error
        if batch is not None:
            return Microbatch(batch, rows)
    samples: list[Any] = []
    batch = BatchStack(reader.count(rows), empty)
    take = samples.append if recipe.collate is not None else batch.add
    skipped: list[Skipped] = []
    for number, (epoch, index) in enumerate(reader.keys(rows)):
        progress(number)
        begin_sample(recipe.seed, epoch, index, globally=recipe.seeded)
        try:
            sample = reader.one(rows, number)
        except Exception as error:
            where = reader.where(rows, number)
            if recipe.skip is None or not isinstance(error, recipe.skip.errors):
                raise sample_error(where, error) from error
            skipped.append(Skipped(reader.identity(rows, number), where, _describe(error)))
            continue
        take(sample)
        del sample
    if len(skipped) == reader.count(rows):
        made = None
    else:
        made = recipe.collate(samples) if recipe.collate is not None else batch.finish()
    return Microbatch(made, rows, skipped, reader.report(rows))


def sample_error(where: str, error: Exception) -> SampleError:
    return SampleError(where, _describe(error), hint="pass skip=Skip(limit=...) to skip such samples")


def _describe(error: Exception) -> str:
    """Return the error and the line of the source's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}"
    last = frames[-1] if frames else None
    if last is None or os.path.dirname(last.filename) == os.path.dirname(__file__):
        return text
    return f"{text} (in {last.name}, {last.filename}:{last.lineno})"
