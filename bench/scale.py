"""What grows with ranks and layouts: 100 TB on 16,384 ranks, DCP planner, layouts. Rows of bench/checkpoint.py."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Contender, Failed, Goal, Options, Row
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from argosy.checkpoint.write_plan import shares
from argosy.transfer import Member, Split, State, Unit, sharded

SCRIPTS = Path(__file__).parent / "scripts"


def measured(command: list[str], timeout_s: float, ranks: int = 1, store: Path | None = None) -> dict[str, Any]:
    """The JSON line of a script, run by so many ranks."""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    env |= {"RENDEZVOUS": str(store)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen([sys.executable, *command], env=env | {"RANK": str(rank)}, text=True, **pipes)
        for rank in range(ranks)
    ]
    try:
        out, err = started[0].communicate(timeout=timeout_s)
        for other in started[1:]:
            other.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        raise Failed(f"not within {timeout_s:g} s") from None
    finally:
        for each in started:
            each.kill()
    if started[0].returncode:
        raise Failed(err.strip().splitlines()[-1][:200] if err.strip() else f"exit {started[0].returncode}")
    return json.loads(out.splitlines()[-1])


def once(measure: Callable[[], dict[str, Any]]) -> Callable[[str], Callable[[], Any]]:
    """Samples by key of one measurement."""
    seen: list[dict[str, Any]] = []

    def of(key: str) -> Callable[[], Any]:
        def sample() -> Any:
            if not seen:
                seen.append(measure())
            return seen[0][key]

        return sample

    return of


def plan_argosy(tensors: int, ranks: int) -> float:
    """A rank's plan of a save, with its layouts made anew."""
    sharded.cache_clear()
    begun = time.perf_counter()
    units: dict[str, Unit] = {}
    for i in range(tensors):
        layout = sharded((8192, 4096 + i % 8), (ranks,), (Split(0),))
        units[f"{i}"] = Unit(f"{i}", {"parameter": Member("parameter", "parameter", "F32", layout)})
    shares(State(7, ranks, units))
    return time.perf_counter() - begun


def plan_dcp(tensors: int, ranks: int) -> float:
    """What DCP's coordinator does with the plans of all ranks; making those is not counted."""
    plans: list[SavePlan] = []
    properties = TensorProperties(torch.float32)
    for rank in range(ranks):
        items: list[WriteItem] = []
        for i in range(tensors):
            rows, width = 8192 // ranks, 4096 + i % 8
            chunk = ChunkStorageMetadata(torch.Size([rank * rows, 0]), torch.Size([rows, width]))
            data = TensorWriteData(chunk, properties, torch.Size([8192, width]))
            index = MetadataIndex(f"{i}", chunk.offsets, rank)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    begun = time.perf_counter()
    create_default_global_save_plan(plans)
    return time.perf_counter() - begun


def row(key: str, title: str, samples: dict[str, Callable[[], Any]], goals: list[Goal], unit: str = "s") -> Row:
    contenders = [Contender(name=name, sample=sample, repeat_max=1) for name, sample in samples.items()]
    return Row(key=key, title=title, base=contenders[0].name, contenders=contenders, goals=goals, unit=unit)


def large_rows(directory: Path, options: Options) -> list[Row]:
    tensors, ranks = (64, 256) if options.quick else (1024, 2048)
    stages = 1 if options.quick else 16

    def hundred() -> dict[str, Any]:
        path = directory / "hundred"
        shutil.rmtree(path, ignore_errors=True)
        try:
            return measured([str(SCRIPTS / "hundred_terabytes.py"), str(path), str(stages)], 600)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    large, steps = once(hundred), ("plan", "manifest", "commit", "open", "restore")
    size = f"{6.26 * stages:.0f} TB on {1024 * stages:,} ranks"
    return [
        row(
            "hundred",
            f"{size}, without data: plan of a rank; manifest and commit of the root; open and restore plan of a rank",
            {step: large(step) for step in steps},
            [Goal(of=step, at_most=60) for step in steps],
        ),
        row("hundred-memory", f"{size}: peak memory", {"peak": large("peak")}, [Goal(of="peak", at_most=4)], "GiB"),
        row("hundred-objects", f"{size}: files", {"objects": large("objects")}, [], "files"),
        Row(
            key="planner",
            title=f"plan a save of {tensors:,} tensors on {ranks:,} ranks",
            base="DCP",
            contenders=[
                Contender(name="argosy", sample=lambda: plan_argosy(tensors, ranks)),
                Contender(name="DCP", sample=lambda: plan_dcp(tensors, ranks), repeat_max=1),
            ],
            goals=[Goal(of="argosy", times_of="DCP", times=50)],
        ),
    ]


def layout_rows(directory: Path, options: Options) -> list[Row]:
    megabytes = 384 if options.quick else 4096

    def relayout() -> dict[str, Any]:
        path = directory / "relayout"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        command = [str(SCRIPTS / "relayout.py"), str(path / "run"), str(megabytes)]
        try:
            return measured(command, 300, 2, path / "store")
        finally:
            shutil.rmtree(path, ignore_errors=True)

    loaded = once(relayout)
    by_rows = "verified load by 2 ranks of what was saved by rows"
    return [
        row(
            "relayout",
            by_rows,
            {"rows": loaded("rows"), "columns": loaded("columns")},
            [Goal(of="columns", times_of="rows", times=1 / 1.3)],
        ),
    ]
