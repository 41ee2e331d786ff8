"""What every launch has in common, whether a command line or a mesh asked for it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from math import prod
from typing import Any

import msgspec

from argosy.control import Launch, Restart, rank_defaults
from argosy.core import ConfigError
from argosy.supervise.imports.scan import fingerprint
from argosy.supervise.imports.zygote_key import zygote_key

RANKS_MAX = 4096
"""Of one host: a launch of more would not fit into a frame, nor into the pids of most machines."""
RESERVED = ("", ".", "..", "last", "leftovers")
"""Names that mean something else to the commands that take a run."""


def build_launch(environment: Mapping[str, str], **asked: Any) -> Launch:
    """Put a launch together: `asked` are its fields that differ between those who launch.

    Raises:
        ConfigError: the name, the dimensions, the policy or a variable cannot be used.
    """
    is_program = asked["kind"] == "program"
    common: dict[str, Any] = {
        "python": [sys.executable, *_interpreter_flags()],
        "cwd": os.getcwd(),
        "umask": _umask(),
        "fingerprint": "" if is_program else fingerprint(sys.path[1:]),
        "log_bytes_max": int(_number(environment, "ARGOSY_LOG_BYTES_MAX", 256 << 20)),
        "linger_s": _number(environment, "ARGOSY_LINGER_S", 600.0),
        "store": not is_program and not asked.get("alone") and find_spec("torch") is not None,
    }
    launch = Launch(**{**common, **asked})
    check_name(launch.name)
    check_ranks(launch.dims)
    check_restart(launch.restart, launch.dims)
    if is_program:
        return launch
    return msgspec.structs.replace(launch, key=zygote_key(launch, {**rank_defaults(launch), **environment}))


def check_name(name: str) -> None:
    """Refuse a name that is a path, looks like an option, or means something else."""
    if "/" in name or name.startswith("-") or name in RESERVED:
        raise ConfigError(f"not a name for a run: {name!r}", hint="give another name")


def check_ranks(dims: Mapping[str, int]) -> None:
    """Refuse a mesh without ranks, or with more than a host can have."""
    if min(dims.values()) < 1:
        raise ConfigError(f"the number of ranks must be positive: {', '.join(map(str, dims.values()))}")
    if prod(dims.values()) > RANKS_MAX:
        raise ConfigError(f"at most {RANKS_MAX} ranks per host: {prod(dims.values())}")


def check_restart(restart: Restart, dims: Mapping[str, int]) -> None:
    """Refuse a policy along a dimension that the mesh does not have."""
    if restart.policy == "group" and restart.along not in dims:
        raise ConfigError(f"no such dimension: {restart.along!r}", hint=f"the mesh has {', '.join(dims)}")


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    """A variable that holds a number, not negative."""
    text = environment.get(name, "")
    try:
        number = float(text or default)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e18:
        raise ConfigError(f"{name} must be a number, not negative: {text!r}")
    return number


def _interpreter_flags() -> list[str]:
    """The flags that this interpreter was started with, for the ranks' own."""
    private = getattr(subprocess, "_args_from_interpreter_flags")  # noqa: B009 - the only source of truth
    flags: list[str] = private()
    return flags


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
