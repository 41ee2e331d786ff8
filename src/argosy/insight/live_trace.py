"""Take a profile of ranks that are training, and put all ranks' traces into one file that Perfetto opens.

T1  A rank that does not answer is named; what the others wrote is still put together.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from argosy.core import ConfigError
from argosy.observe import answers, request_profile

POLL_S = 0.1
PIDS_OF_A_RANK, IDS_OF_A_RANK = 1 << 10, 1 << 32
"""Process numbers and flow ids are those of one rank in its own file: in one file they lie apart."""


class LiveTrace(msgspec.Struct, frozen=True):
    """The merged file, and ranks that gave no trace, with the reason."""

    path: str
    ranks: list[int]
    missing: dict[int, str]


def trace_ranks(
    memory: Path, metrics: Path, ranks: Sequence[int], steps: int, wait_s: float, output: Path
) -> LiveTrace:
    """Profile the next steps of these ranks; `memory` holds their rings, `metrics` the records of their launch.

    Raises:
        ConfigError: no rank gave a trace within `wait_s`.
        OSError: the file cannot be written.
    """
    request, deadline = int(time.time()), time.monotonic() + wait_s
    folder = metrics / "traces" / str(request)
    asked: set[int] = set()
    while True:
        asked |= {rank for rank in ranks if rank not in asked and _ask(memory, rank, request, steps)}
        found = answers(folder)
        if found.keys() >= set(ranks) or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    missing: dict[int, str] = {}
    for rank in ranks:
        if rank not in found:
            late = f"did not finish {steps + 1} steps within {wait_s:.0f} s"
            missing[rank] = late if rank in asked else "it has not started, or is on another host"
        elif found[rank].suffix == ".error":
            missing[rank] = found[rank].read_text(errors="replace")
    traced = {rank: found[rank] for rank in ranks if rank not in missing}
    if not traced:
        why = "; ".join(f"rank {rank}: {reason}" for rank, reason in missing.items())
        raise ConfigError(f"no rank gave a trace: {why}", hint="a rank must finish steps: see `argosy stacks`")
    merge_traces(traced, output)
    return LiveTrace(str(output), sorted(traced), missing)


def _ask(memory: Path, rank: int, request: int, steps: int) -> bool:
    """Ask a rank for a profile; False if it has no ring here, because it has not started yet, for example."""
    rings = sorted(memory.glob(f"{rank}.*.page.spans"), key=lambda path: int(path.name.split(".")[1]))
    try:
        request_profile(rings[-1], request, steps)
    except (IndexError, OSError, ValueError):
        return False
    return True


def merge_traces(traces: Mapping[int, Path], output: Path) -> None:
    """Write the traces of ranks as one: each rank's processes carry its name, times are counted from one moment.

    Raises:
        ConfigError: a file is no trace.
        OSError: one cannot be read or written.
    """
    first = ""
    unfinished = output.with_name(f".{output.name}.new")
    with open(unfinished, "wb") as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        base: int | None = None
        for rank, path in sorted(traces.items()):
            try:
                trace = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
                events: list[dict[str, Any]] = trace["traceEvents"]
            except (msgspec.MsgspecError, KeyError):
                raise ConfigError(f"not a trace of torch.profiler: {path}") from None
            began = int(trace.get("baseTimeNanoseconds", 0))
            base = began if base is None else base
            for event in _moved(events, rank, (began - base) / 1e3):
                file.write(first.encode() + msgspec.json.encode(event))
                first = ",\n"
        file.write(b"\n]}\n")
    os.replace(unfinished, output)


def _moved(events: Sequence[dict[str, Any]], rank: int, shift_us: float) -> Sequence[dict[str, Any]]:
    """The events of one rank under process numbers and ids of its own, on the common clock."""
    pids: dict[Any, int] = {}
    for event in events:
        pid = event.get("pid", 0)
        event["pid"] = pids.setdefault(pid, rank * PIDS_OF_A_RANK + len(pids))
        if "ts" in event:
            event["ts"] += shift_us
        if isinstance(event.get("id"), int):
            event["id"] += rank * IDS_OF_A_RANK
        arguments = event.get("args")
        if event.get("name") == "process_name" and isinstance(arguments, dict):
            arguments["name"] = f"rank {rank}: {pid}"
        elif event.get("name") == "process_sort_index" and isinstance(arguments, dict):
            arguments["sort_index"] = event["pid"]
    return events
