"""Compile the Triton kernels for GPUs that are not here, and read what they take: registers, spills, shared memory."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from argosy.kernels import triton_rows as kernels

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
ROW = {"targets": "*i64", "columns": "i32", "stride": "i64", "BLOCK": "constexpr", "WIDE": "constexpr"}
DEADLINE_S = 60.0
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton warns where nobody chose; its next default is 0.


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread takes of registers, and one program of shared memory."""

    registers: int
    spills: int
    """Registers on AMD, bytes of local memory on NVIDIA."""
    shared_bytes: int


def programs() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Name → kernel, types of its arguments, constants."""
    found: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {}
    for dtype in ("fp32", "bf16"):
        rows = {"BLOCK": kernels.COLUMNS, "WIDE": tl.float32}
        stats = {"logits": f"*{dtype}", "norms": "*fp32", "labels": "*fp32", **ROW}
        slopes = {"logits": f"*{dtype}", "norms": "*fp32", "weights": "*fp32", **ROW}
        squares = {"numbers": f"*{dtype}", "sums": "*fp64", "count": "i64", "BLOCK": "constexpr"}
        found[f"row_stats {dtype}"] = kernels.row_stats, stats, rows
        found[f"row_slopes {dtype}"] = kernels.row_slopes, slopes, rows
        found[f"block_squares {dtype}"] = kernels.block_squares, squares, {"BLOCK": kernels.NUMBERS}
    return found


def measure_resources(target: str) -> dict[str, Resources]:
    """Compile every kernel for a target; no GPU and no driver are needed."""
    backend, arch, warp = TARGETS[target]
    found: dict[str, Resources] = {}
    for name, (kernel, types, constants) in programs().items():
        signature = {each: types[each] for each in kernel.arg_names}
        compiled: Any = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget(backend, arch, warp))
        found[name] = of_amd(compiled.asm["amdgcn"]) if backend == "hip" else of_nvidia(compiled.asm["cubin"])
    return found


def of_nvidia(binary: bytes) -> Resources:
    """What the wheel's cuobjdump says of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    values = {name: int(number) for name, number in re.findall(r"(REG|LOCAL|STACK|SHARED):(\d+)", text)}
    return Resources(values["REG"], values.get("LOCAL", 0) + values.get("STACK", 0), values["SHARED"])


def of_amd(assembly: str) -> Resources:
    """What the assembly says of itself."""

    def value(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    return Resources(
        value("vgpr_count"), value("vgpr_spill_count") + value("sgpr_spill_count"), value("group_segment_fixed_size")
    )
