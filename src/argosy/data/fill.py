"""Make one microbatch from the rows that name its samples: the same code in the loader, its threads and workers.

M1  What a batch holds depends on its rows, the seed and the source alone, not on who makes it or when.
"""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from argosy.core import ConfigError
from argosy.data.collate import Collate, Empty, Stack
from argosy.data.errors import SampleError
from argosy.data.keyed import begin_sample
from argosy.data.plan import Identity, Reader, Rows


@dataclass(frozen=True, slots=True)
class Skip:
    """Leave out samples that raise, and keep a record; at most `limit` of them in the whole training.

    Errors of other classes than `errors` still end the training. A batch gets shorter by what is left out.
    """

    limit: int = 100
    errors: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"the limit of skipped samples is at least 1: {self.limit}")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that was left out."""

    identity: Identity
    where: str
    error: str


@dataclass(slots=True)
class Filled:
    """A microbatch; `batch` is None if every sample of it was skipped."""

    batch: Any
    rows: Rows
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    extra: Any = None
    """What the reader of an iterable reports beside its samples."""


@dataclass(slots=True)
class Recipe:
    """All that making a batch depends on besides its rows; pickled once for all workers."""

    reader: Reader
    seed: int = 0
    skip: Skip | None = None
    collate: Collate | None = None
    seeded: bool = True
    """The global generators are keyed per sample; not where threads share them."""


def _nothing(_: int) -> None:
    return


def fill(
    recipe: Recipe, rows: Rows, empty: Empty, progress: Callable[[int], None] = _nothing, hint: Any = None
) -> Filled:
    """Make the batch; `progress` is told the number of each sample before it is made.

    `hint` is what the plan knows that saves the reader work.

    Raises:
        SampleError: a sample raised, and the policy does not skip it. Its cause is the sample's own error.
        ConfigError: the samples do not fit together.
    """
    reader: Any = recipe.reader
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
            return Filled(batch, rows)
    samples: list[Any] = []
    batch = Stack(reader.count(rows), empty)
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
    report = getattr(reader, "report", None)
    return Filled(made, rows, skipped, report(rows) if report is not None else None)


def sample_error(where: str, error: Exception) -> SampleError:
    return SampleError(where, _describe(error), hint="pass skip=Skip(limit=...) to leave such samples out")


def _describe(error: Exception) -> str:
    """The error, and the line of the source's own code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}"
    last = frames[-1] if frames else None
    if last is None or os.path.dirname(last.filename) == os.path.dirname(__file__):
        return text
    return f"{text} (in {last.name}, {last.filename}:{last.lineno})"
