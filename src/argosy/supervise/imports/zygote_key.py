"""Which zygote can fork the ranks of a launch: one with the same imports, which would read the same values.

Imports read some variables of the environment; the others may differ between launches that share a zygote, since
each rank gets its own. Which ones are read is known after the first zygote with these imports has come up.
"""

import contextlib
import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from argosy.control import Launch, imports_id
from argosy.fabric import cache_dir
from argosy.supervise.records.rundir import write_atomically

UNKEYED = frozenset(
    {"PWD", "OLDPWD", "SHLVL", "_", "WINDOWID", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST"}
    | {"OPENBLAS_NUM_THREADS", "JE_ARROW_MALLOC_CONF"}  # The zygote has its own values for these.
)
UNKEYED_PREFIXES = ("TERM", "SSH_", "TMUX", "ARGOSY_")
NATIVE_PREFIXES = (
    *("LD_", "GLIBC_", "MALLOC_", "PYTHON", "LC_", "LANG", "TZ"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NVPL_", "TBB_", "DNNL_", "ONEDNN_"),
    *("TORCH", "PYTORCH_", "ATEN_", "C10_", "KINETO_", "GLOO_", "NCCL_", "UCX_", "UCC_", "XLA_", "TF_"),
    *("CUDA", "CUBLAS_", "CUDNN_", "NVIDIA_", "HIP_", "ROC", "HSA_", "AMD_", "SYCL_", "ZE_", "ONEAPI_"),
    *("ARROW_", "JE_", "TCMALLOC", "MIMALLOC_", "RAYON_", "RUST_", "HDF5_", "OPENSSL_", "GRPC_"),
)
"""Read by the interpreter, the loader and native libraries, which no import shows."""
ALL = "*"
"""Stands for every name: an import went through the whole environment."""


def zygote_key(launch: Launch, env: Mapping[str, str]) -> str:
    """Name the zygote that can fork these ranks, as far as it is known what its imports read."""
    imports = imports_id(launch)
    return key_for(imports, env, recall_reads(imports))


def key_for(imports: str, env: Mapping[str, str], read: Collection[str]) -> str:
    """Name a zygote by its imports and by the variables that count for them; `read` are those that imports read."""
    digest = hashlib.blake2s(imports.encode(), digest_size=8)
    for name in sorted(env):
        counts = ALL in read or name in read or name.startswith(NATIVE_PREFIXES)
        if counts and name not in UNKEYED and not name.startswith(UNKEYED_PREFIXES):
            digest.update(f"{name}={env[name]}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def recall_reads(imports: str) -> set[str]:
    """The variables that these imports were seen to read; all if they were never seen."""
    try:
        return msgspec.json.decode(_memory(imports).read_bytes(), type=set[str])
    except (OSError, msgspec.MsgspecError):
        return {ALL}


def remember_reads(imports: str, read: Collection[str]) -> None:
    """Add what a zygote's imports read; what cannot be written is found out again."""
    path = _memory(imports)
    known = recall_reads(imports) if path.exists() else set[str]()
    if not {*read} <= known or not path.exists():
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(sorted({*known, *read})))


def _memory(imports: str) -> Path:
    return cache_dir() / "import-reads" / f"{imports}.json"
