"""`argosy run --nnodes N --node-rank K`, the same command on each node, as under torchrun."""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from argosy.core import ArgosyError, ConfigError
from argosy.hosts import JoinRequest, check_host, engine_text

RECORD_S = 60.0
"""How long after its hosts a run may take to end."""


def count_nodes(text: str) -> int:
    """How many nodes `--nnodes` means.

    Raises:
        ConfigError: it is no number, or a range.
    """
    low, _, high = text.partition(":")
    if not low.isdecimal() or int(low) < 1 or (high and high != low):
        raise ConfigError(f"--nnodes must be one number: {text}", hint="the number of nodes of a run does not change")
    return int(low)


def find_node_rank(given: int | None, count: int, environment: Mapping[str, str]) -> int:
    """Which node this is: `--node-rank`, or what `srun` says.

    Raises:
        ConfigError: nobody says so, or there is no such node.
    """
    told = environment.get("SLURM_NODEID") if environment.get("SLURM_STEP_ID") is not None else None
    if given is None and told is None:
        raise ConfigError("--nnodes needs --node-rank on each node: 0 on the first, which heads the run")
    rank = int(told or 0) if given is None else given
    if not 0 <= rank < count:
        raise ConfigError(f"--node-rank must be one of 0-{count - 1}: {rank}")
    return rank


def shared_name(rdzv_id: str | None, environment: Mapping[str, str]) -> str | None:
    """What the run is called on all nodes alike, if its command line names neither run nor directory."""
    job, step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")
    return rdzv_id or (f"slurm-{job}.{step}" if job and step else None)


def head_engine(count: int, master_addr: str, endpoint: str | None, directory: Path) -> str:
    """The engine of node 0; the others reach it under the address that their commands name too."""
    named = endpoint.rpartition(":")[0] or endpoint if endpoint else master_addr
    try:
        address = socket.getaddrinfo(named, None, family=socket.AF_INET)[0][4][0]
    except OSError as error:
        raise ConfigError(f"the address of node 0 is unknown: {named}: {error.strerror}") from None
    return engine_text(count, str(address), directory)


def serve_node(rank: int, directory: Path) -> int:
    """Be one of the other nodes until the run is over; returns the exit code of the run."""
    from argosy.cli.accelerators import list_accelerators
    from argosy.supervise import decode_membership, read_record, refuse_to_serve, serve_as_host

    request = JoinRequest(directory, f"node{rank}")
    membership = decode_membership(request.wait())
    credentials = membership.credentials
    place = Path(f"/tmp/argosy-{os.getuid()}", f"{credentials.run}.{credentials.name}")
    try:
        if reason := check_host(membership.needs, place, len(list_accelerators(os.environ))):
            refuse_to_serve(membership, reason)
            raise ConfigError(f"this node is not used: {reason}")
        code = serve_as_host(membership, place)
    finally:
        request.end()
    deadline = time.monotonic() + RECORD_S
    while code == 0 and time.monotonic() < deadline:
        with suppress(ArgosyError):
            record = read_record(directory)
            if record.state == "ended":
                return record.code or 0
        time.sleep(0.1)
    return code or 1
