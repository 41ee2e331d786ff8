"""Declare the Rust extension where it can be built; everything else is in pyproject.toml.

`ARGOSY_NATIVE=1` demands the extension, `0` skips it; unset, it is built on Linux if cargo is found.
It is never `optional`: that would hide a compile error and leave an older binary in its place.
"""

import os
import shutil
import sys
from typing import Any

from setuptools import setup


def native_arguments() -> dict[str, Any]:
    """What `setup` needs to build `argosy._native`, or nothing."""
    wanted = os.environ.get("ARGOSY_NATIVE", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"ARGOSY_NATIVE must be 0 or 1: {wanted!r}")
    possible = sys.platform == "linux" and shutil.which("cargo") is not None
    if wanted == "0" or (wanted == "" and not possible):
        return {}
    from setuptools_rust import Binding, RustExtension

    extension = RustExtension(
        "argosy._native",
        path="native/Cargo.toml",
        binding=Binding.PyO3,
        rust_version=">=1.83",
        cargo_manifest_args=["--locked"],
        debug=False,
        py_limited_api=True,
    )
    # One wheel serves every Python from 3.11 on.
    return {"rust_extensions": [extension], "options": {"bdist_wheel": {"py_limited_api": "cp311"}}}


setup(**native_arguments())
