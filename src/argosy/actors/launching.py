"""From what a mesh was asked for to a launch that the agent can start."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from argosy.actors.server import PATH
from argosy.control import TORCH, Launch, Restart
from argosy.core import ConfigError
from argosy.fabric import Link, cache_dir
from argosy.supervise import (
    ToClient,
    Welcome,
    build_launch,
    default_name,
    own_limits,
    scan,
    seal_environment,
    submit,
)

HOST = "argosy.actors"
_NEEDED = ("argosy.actors.server", "argosy.actors.handles")
GRACE_S = 5.0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, of a mesh or a program."""

    name: str | None = None
    dims: dict[str, int]
    restart: Restart
    preload: Sequence[str] | None = None
    spares: int = 0
    hang_after_s: float = 30.0
    argv: Sequence[str] = ()
    """A program to execute; empty for a mesh."""


def make_launch(wanted: Wanted) -> tuple[Launch, dict[str, str]]:
    """The launch, and the environment of its ranks."""
    _check_kinds(wanted)
    if wanted.spares and (wanted.spares < 0 or wanted.restart.policy == "never"):
        raise ConfigError(
            f"spares take the place of ranks that are replaced: spares={wanted.spares}",
            hint="give a number of them and restart=argosy.Restart.rank()",
        )
    if wanted.hang_after_s <= 0:
        raise ConfigError(f"hang_after_s must be positive: {wanted.hang_after_s}")
    environment = {name: value for name, value in os.environ.items() if not _is_a_ranks_own(name)}
    environment[PATH] = _path()
    directory = _directory(wanted)
    target, args = (wanted.argv[0], list(wanted.argv[1:])) if wanted.argv else (HOST, [])
    launch = build_launch(
        environment,
        name=directory.name if wanted.name is None else wanted.name,
        directory=str(directory),
        fresh=wanted.name is None,
        argv=list(wanted.argv) or [Path(sys.argv[0] or "python").name, "(mesh)"],
        kind="program" if wanted.argv else "module",
        target=target,
        args=args,
        dims=dict(wanted.dims),
        preload=[] if wanted.argv else preloads(wanted.preload),
        restart=wanted.restart,
        spares=wanted.spares,
        hang_after_s=wanted.hang_after_s,
        grace_s=GRACE_S,
    )
    return launch, environment


def _check_kinds(wanted: Wanted) -> None:
    """Refuse values of the wrong kind, as a notebook or a script without types may give them."""
    restart, extents = cast(object, wanted.restart), cast("dict[str, object]", wanted.dims)
    if not isinstance(restart, Restart):
        policy = restart if restart in ("rank", "all", "never") else "rank"
        raise ConfigError(f"restart takes a policy: {restart!r}", hint=f"restart=argosy.Restart.{policy}()")
    for name, extent in extents.items():
        if not isinstance(extent, int):
            raise ConfigError(f"a dimension is a number of ranks: {name}={extent!r}")
    for name, value in (("preload", wanted.preload), ("argv", wanted.argv)):
        if isinstance(value, str):
            raise ConfigError(f"{name} takes a list of words: {value!r}", hint=f"{name}={value.split()}")


def start(wanted: Wanted) -> tuple[Link[ToClient], Welcome]:
    """Launch a mesh or a program."""
    launch, environment = make_launch(wanted)
    sealed = seal_environment(environment, {}, own_limits())
    try:
        return submit(launch, [sealed])
    finally:
        os.close(sealed)


def preloads(asked: Sequence[str] | None) -> list[str]:
    """What the zygote imports: what was asked for, or what the calling script imports."""
    if asked is None:
        main = getattr(sys.modules["__main__"], "__file__", None)
        if main is not None and os.path.isfile(main) and "ipykernel" not in sys.modules:
            asked = scan(main, False, sys.path[1:], cache_dir() / "scans")
        else:
            asked = [name for name in ("numpy", "torch") if name in sys.modules]
    entries = list(asked)
    if "torch" in entries:
        entries = [*TORCH, *(entry for entry in entries if entry not in TORCH)]
    return [*_NEEDED, *entries]


def _is_a_ranks_own(name: str) -> bool:
    """Variables that say which rank this is: a child mesh has ranks of its own."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ARGOSY_RUN")
    return name in own or name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_", "ARGOSY_RUN_", "ARGOSY_GEN"))


def _path() -> str:
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def _directory(wanted: Wanted) -> Path:
    stem = wanted.argv[0] if wanted.argv else (sys.argv[0] if Path(sys.argv[0]).suffix == ".py" else "mesh")
    return Path("runs").absolute() / (wanted.name or default_name(stem))
