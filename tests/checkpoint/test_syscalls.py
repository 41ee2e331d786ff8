"""The disk sees what was planned: strace of a real save is the list of operations."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import argosy

PROGRAM = """
import sys
import numpy as np
from argosy.checkpoint import Saver
from argosy.checkpoint.operations import Slice, Write
saver = Saver(sys.argv[1])
def show(operation):
    kind, size = type(operation).__name__, 0
    if isinstance(operation, Write):
        size = operation.data.length if isinstance(operation.data, Slice) else len(operation.data)
        print("plan", kind, operation.path, operation.offset, size, flush=True)
    else:
        print("plan", kind, *operation, flush=True)
saver._committer.before = show
saver.save({"a": np.random.default_rng(0).random(2_500_000), "b": np.arange(9)}, 1).wait(300)
"""


def planned(lines: list[str], root: Path) -> list[tuple[str, ...]]:
    """The operations as system calls: (call, path relative to the directory, numbers)."""
    found: list[tuple[str, ...]] = []
    for line in lines:
        _, kind, *rest = line.split()
        match kind:
            case "Create":
                found.append(("create", rest[0]))
            case "Write":
                found.append(("write", rest[0], rest[1], rest[2]))
            case "Truncate":
                found.append(("truncate", *rest))
            case "Sync" | "SyncDir":
                found.append(("sync", rest[0]))
            case "Rename":
                found.append(("rename", *rest[:2]))
            case _:
                pass
    return found


def traced(text: str, root: Path) -> list[tuple[str, ...]]:
    """What strace saw below the directory of checkpoints, in order of the calls."""
    found: list[tuple[str, ...]] = []
    prefix = re.escape(str(root))
    calls = {
        "create": rf'openat\(\S+, "{prefix}/(\S+)", O_WRONLY\|O_CREAT\|O_TRUNC',
        "write": rf"pwrite64\(\d+<{prefix}/([^>]+)>, .*, (\d+), (\d+)(?:\)| <unfinished)",
        "truncate": rf"ftruncate\(\d+<{prefix}/([^>]+)>, (\d+)",
        "sync": rf"(?:fsync|fdatasync)\(\d+<{prefix}(/[^>]*)?>",
        "rename": rf'rename\("{prefix}/([^"]+)", "{prefix}/([^"]+)"',
    }
    for line in text.splitlines():
        for name, pattern in calls.items():
            if match := re.search(pattern, line):
                parts = [(part or "").removeprefix("/") or "." for part in match.groups()]
                if name == "write":
                    parts = [parts[0], parts[2], parts[1]]
                found.append((name, *parts))
    return found


@pytest.mark.system
def test_strace_of_a_save_is_the_plan(tmp_path: Path):
    env = os.environ | {"PYTHONPATH": str(Path(argosy.__file__).parents[1])}
    trace = tmp_path / "trace"
    calls = "openat,pwrite64,ftruncate,fsync,fdatasync,rename,unlink"
    ended = subprocess.run(
        [
            "strace",
            "-f",
            "-y",
            "-o",
            str(trace),
            "-e",
            f"trace={calls}",
            sys.executable,
            "-c",
            PROGRAM,
            str(tmp_path / "r"),
        ],
        env=env,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    root = tmp_path / "r/checkpoints"
    plan = planned([line for line in ended.stdout.splitlines() if line.startswith("plan ")], root)
    seen = [call for call in traced(trace.read_text(), root) if "step-" in call[1] or call == ("sync", ".")]

    def in_order(calls: list[tuple[str, ...]]) -> list[object]:
        """Writes of a file between two other operations may go out in any order."""
        result: list[object] = []
        for call in calls:
            if call[0] == "write" and result and isinstance(result[-1], set):
                result[-1].add(call)
            else:
                result.append({call} if call[0] == "write" else call)
        return result

    assert in_order(seen) == in_order(plan)
    assert sum(call[0] == "write" for call in plan) >= 5
