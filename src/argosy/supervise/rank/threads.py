"""Give a forked rank the BLAS threads that it would have had, had it imported numpy itself.

OpenBLAS takes its number of threads, and starts them, when it is loaded. A zygote loads it with one.
torch, OpenMP and MKL need nothing if OMP_NUM_THREADS was in the zygote's environment: they start threads
at first use.
"""

import ctypes
from collections.abc import Callable, Mapping

# In the order of precedence in OpenBLAS.
_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_SYMBOLS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)


def blas_threads(environ: Mapping[str, str], cores: int) -> int:
    """Return how many threads OpenBLAS would take in this environment, on this many cores."""
    for name in _VARIABLES:
        digits = environ.get(name, "").strip().partition(",")[0]
        if digits.isdecimal() and int(digits) > 0:
            return min(int(digits), cores)
    return cores


def blas_setters() -> list[Callable[[int], object]]:
    """Return a setter of threads per loaded OpenBLAS: found once in the zygote, called in ranks."""
    with open("/proc/self/maps") as maps:
        files = dict.fromkeys(line.split(maxsplit=5)[-1].strip() for line in maps if "openblas" in line)
    setters: list[Callable[[int], object]] = []
    for file in files:
        try:
            library = ctypes.CDLL(file)
        except OSError:
            continue
        setters += [getattr(library, symbol) for symbol in _SYMBOLS if hasattr(library, symbol)]
    return setters
