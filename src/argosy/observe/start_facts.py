"""What a run started with: code, packages, hardware. Gathered by the drain, not by the ranks."""

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import msgspec
import psutil

DIFF_BYTES_MAX = 256 << 10
GIT_S = 10.0


def gather_facts(run_directory: Path) -> dict[str, Any]:
    """Everything that can be found out; what cannot is missing."""
    record: dict[str, Any] = {}
    with suppress(OSError, msgspec.MsgspecError):
        record = msgspec.json.decode((run_directory / "run.json").read_bytes())
    cwd = str(record.get("cwd", run_directory))
    return {
        "argv": record.get("argv", []),
        "cwd": cwd,
        "git": _git(cwd),
        "packages": _packages(),
        "hardware": _hardware(),
    }


def _git(cwd: str) -> dict[str, Any]:
    def ask(*words: str) -> str | None:
        with suppress(OSError, subprocess.SubprocessError):
            environment: Mapping[str, str] = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
            asked = subprocess.run(
                ["git", "-C", cwd, *words], capture_output=True, timeout=GIT_S, env=environment, check=True
            )
            return asked.stdout.decode(errors="replace")
        return None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return {}
    diff = ask("diff", "HEAD") or ""
    whole = diff.encode()
    return {
        "commit": commit.strip(),
        "dirty": bool((ask("status", "--porcelain") or "").strip()),
        "diff": whole[:DIFF_BYTES_MAX].decode(errors="replace"),
        "diff_bytes": len(whole),
    }


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for each in distributions():
        with suppress(Exception):
            found[each.metadata["Name"]] = each.version
    return dict(sorted(found.items()))


def _hardware() -> dict[str, Any]:
    model = ""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    gpus: list[str] = []
    with suppress(OSError):
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
            gpus += [line.partition(":")[2].strip() for line in path.read_text().splitlines() if "Model" in line]
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
    }
