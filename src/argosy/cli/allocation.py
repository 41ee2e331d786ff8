"""Which hosts a run gets: those that `--on` names, or the nodes of the allocation that the command is in."""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from argosy.control import facts
from argosy.core import ArgosyError, ConfigError
from argosy.hosts import find_engine, in_allocation
from argosy.supervise import read_facts

GRACE_S = 20.0
"""Slurm kills what is left of a job after 30 s, unless its KillWait says otherwise."""
DAEMONS_S = 15.0


def notice_allocation(engine: str | None, environment: Mapping[str, str]) -> str | None:
    """The engine that was named, or `slurm` in an allocation of several nodes."""
    if engine is None and in_allocation(environment) and environment.get("SLURM_JOB_NUM_NODES", "1") != "1":
        return "slurm"
    return engine


def settle_engine(engine: str | None, hosts: int | None, spares: int) -> str | None:
    """Write down how many nodes are to be had of an engine that has any number of them."""
    kind, _, address = (engine or "").partition(":")
    if kind != "ray" or hosts is None:
        return engine
    return f"ray:{hosts + spares}" + (f"@{address}" if address else "")


def wants_job(engine: str | None, environment: Mapping[str, str]) -> bool:
    """Whether Slurm has to be asked for an allocation first."""
    return engine is not None and engine.partition(":")[0] == "slurm" and not in_allocation(environment)


def name_hosts(engine: str | None, hosts: int | None, spares: int, excluded: Sequence[str] = ()) -> list[str]:
    """The hosts that an engine gives, spare ones last, without the excluded ones; none without an engine.

    Raises:
        ConfigError: it cannot give so many.
    """
    if engine is None:
        if hosts is not None or spares:
            raise ConfigError("--hosts needs --on: where the hosts come from", hint="--on local:2")
        return []
    names = [name for name in find_engine(engine, "").names if name not in excluded]
    wanted = spares + (hosts or 1)
    if wanted > len(names):
        raise ConfigError(f"{engine} has {len(names)} hosts, not {wanted}")
    return names


def trusted_first(names: list[str], directory: Path) -> list[str]:
    """The hosts, those last that an earlier launch of this directory has lost: they become the spare ones."""
    lost = {fact.host: fact for fact in read_facts(directory) if isinstance(fact, facts.HostLost)} if names else {}
    for name in [name for name in names if name in lost]:
        print(f"argosy: host {name} was lost before ({lost[name].reason}): it is used last", file=sys.stderr)
    return sorted(names, key=lambda name: name in lost)


def leave_allocation(environment: Mapping[str, str]) -> None:
    """Within an allocation: wait until the daemons have removed what they had on this node. Then the job may end."""
    if not in_allocation(environment):
        return
    from argosy.fabric import runtime_dir
    from argosy.supervise import is_inhabited, list_runs

    runtime, deadline = runtime_dir(), time.monotonic() + DAEMONS_S
    while is_inhabited(runtime) and time.monotonic() < deadline:
        with suppress(ArgosyError):
            if list_runs().runs:
                return  # Another command of the job needs them.
        time.sleep(0.1)
    for made in (runtime, runtime.parent):  # Asking for the directory made it again.
        with suppress(OSError):
            made.rmdir()
