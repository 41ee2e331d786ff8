"""What all ranks decided about a compiled step: whether it runs as a graph, and which regions run as compiled code.

Ranks that start together ask each other. A rank that replaces another cannot: the others are in the middle of training.
It reads the decision from the run's directory, and must come to the same one.
"""

# pyright: reportUnknownMemberType=false

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from argosy.core import ConfigError

_calls = count()
"""Compiled steps of this process, in order: the same order on all ranks."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The decision of all ranks."""

    reason: str
    """Why the step runs eagerly; empty if it runs as a graph."""
    order: str
    """The digest of the graph's collectives."""
    regions: list[str]


def agree(order: str, regions: Collection[str], failure: str) -> Agreement:
    """Decide with all ranks; `failure` says why this rank has no graph, or is empty.

    Raises:
        ConfigError: this rank replaces another, and has not the graph that the others run.
    """
    path = decision_path(next(_calls))
    if path is not None and is_replacement() and (kept := read(path)) is not None:
        missing = set(kept.regions) - set(regions)
        if not kept.reason and (failure or order != kept.order or missing):
            what = failure or ("other collectives" if order != kept.order else f"{len(missing)} regions not compiled")
            raise ConfigError(f"a replaced rank cannot run the graph of the others: {what}")
        return kept
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Agreement(failure, order, sorted(regions))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (order, sorted(regions), failure))
    decided = decide(found)
    if path is not None and dist.get_rank() == 0:
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(asdict(decided)))
        written.rename(path)
    if path is not None:
        dist.barrier()  # Nobody trains, and so nobody is replaced, before the decision is kept.
    return decided


def decide(found: list[tuple[str, list[str], str]]) -> Agreement:
    """A graph if all ranks have one with the same collectives; the regions that all ranks compiled.

    Replicas must compute with the same code: they would drift apart by rounding.
    """
    orders = [order for order, _, _ in found]
    reason = next((f"rank {rank}: {failure}" for rank, (_, _, failure) in enumerate(found) if failure), "")
    if not reason and len(set(orders)) > 1:
        reason = f"the ranks have different collectives: {', '.join(orders)}"
    return Agreement(reason, orders[0], sorted(set[str]().union(found[0][1]).intersection(*(r for _, r, _ in found))))


def is_replacement() -> bool:
    return os.environ.get("ARGOSY_GENERATION", "0") != "0"


def decision_path(number: int) -> Path | None:
    """Where the decision about this process's step of that number is kept; None outside a run."""
    directory = os.environ.get("ARGOSY_RUN_DIR")
    return Path(directory) / f"compiled-{os.environ.get('ARGOSY_RUN', 'run')}-{number}.json" if directory else None


def read(path: Path) -> Agreement | None:
    try:
        return Agreement(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
