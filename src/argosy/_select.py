"""Choose between the Rust extension and its Python reference, once per process.

Rooms write `from argosy._select import native` in the file that owns the call.
"""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

# Only a missing file means "not built": an extension that exists but does not load raises its error.
native_is_compiled: bool = os.environ.get("ARGOSY_NATIVE") != "0" and find_spec("argosy._native") is not None

if TYPE_CHECKING or native_is_compiled:
    from argosy import _native as native
else:
    from argosy import _reference as native

__all__ = ["native", "native_is_compiled"]
