"""Certificates on disk: a graph that was rewritten and proven once is only rewritten the next time.

The key covers the graph, the chip, the passes, and the source of this package; what the kept passes then give is
compared with what was proven, so a stale file costs time and never changes a graph.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import msgspec
import torch

import argosy
from argosy.cost import Chip
from argosy.fabric import cache_dir
from argosy.graph.certificate import Certificate, apply_passes, graph_text
from argosy.graph.file_lock import locked
from argosy.graph.passes import Pass
from argosy.graph.simulate import world_of
from argosy.graph.step_capture import StepGraph


def apply_passes_once(
    step: StepGraph, passes: Mapping[str, Pass], chip: Chip
) -> tuple[StepGraph, list[Certificate], bool]:
    """As `apply_passes`; the last result is whether the certificates came from disk."""
    path = cache_dir() / "certificates" / f"{cache_key(step, passes, chip)}.json"
    with locked(path.with_suffix(".lock")):  # Ranks of one host have the same graph: one proves it.
        found = replay(step, passes, chip, path)
        if found is not None:
            return *found, True
        after, certificates = apply_passes(step, passes, chip)
        data = {"after": digest(graph_text(after.graph)), "certificates": [asdict(each) for each in certificates]}
        with suppress(OSError):
            written = path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(data))
            written.rename(path)
        return after, certificates, False


def replay(
    step: StepGraph, passes: Mapping[str, Pass], chip: Chip, path: Path
) -> tuple[StepGraph, list[Certificate]] | None:
    """The step after the passes that were kept, if they still give the graph that was proven."""
    try:
        data = json.loads(path.read_text())
        certificates = msgspec.convert(data["certificates"], list[Certificate])
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
        return None
    with world_of(step):
        for each in certificates:
            if each.kept:
                step = passes[each.name](step.copy(), chip)
    if digest(graph_text(step.graph)) != data["after"]:
        return None
    step.module.recompile()
    return step, certificates


def cache_key(step: StepGraph, passes: Mapping[str, Pass], chip: Chip) -> str:
    looks = [str(node.meta["val"].shape) for node in step.graph.nodes if node.op == "placeholder"]
    sources = [f"{name} {source_of(each)}" for name, each in passes.items()]
    whole = [graph_text(step.graph), *looks, str(step.recipe), repr(chip), *sources, package_digest()]
    return digest("\n".join([*whole, torch.__version__]))


def source_of(function: Pass) -> str:
    """The file that a pass is written in; a pass without one is never found again."""
    try:
        file = inspect.getsourcefile(function)
        return digest(Path(file).read_text()) if file else repr(function)
    except (TypeError, OSError):
        return repr(function)


@cache
def package_digest() -> str:
    root = Path(argosy.__file__).parent
    files = sorted(each for room in ("graph", "cost", "kernels") for each in (root / room).rglob("*.py"))
    return digest("\n".join(each.read_text() for each in files))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
