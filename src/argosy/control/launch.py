"""What one `argosy run` asks for, and the environment that each of its ranks gets."""

import hashlib
from typing import Literal

import msgspec

from argosy.control.restart import Restart

TORCH = ("torch", "torch.distributed", "torch.profiler")
DYNAMO = "torch._dynamo"
"""The first optimizer imports it: in a forked rank that is a second of CPU and 140 MB of its own."""
OF_TORCH = frozenset((*TORCH, DYNAMO))


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of a run, as the client describes it to the agent. Secrets are not in here."""

    name: str
    directory: str
    argv: list[str]
    kind: Literal["script", "module", "program"]
    target: str
    args: list[str]
    python: list[str]
    """Interpreter and flags of the ranks."""
    dims: dict[str, int]
    nodes: int = 1
    """On how many hosts the ranks are, the same number on each, in order."""
    engine: str = ""
    """Where the hosts come from, such as `local:3`; empty: all ranks are on the host of the head."""
    check: str = ""
    """A shell command that has to succeed on each host before it is used."""
    alone: bool = False
    """No number of ranks was given: the process gets none of torchrun's variables, as under `python script.py`."""
    cwd: str
    umask: int
    preload: list[str] = []
    key: str = ""
    """Names the zygote that serves this launch."""
    fingerprint: str = ""
    """Of the installed packages."""
    restart: Restart
    spares: int = 0
    """Processes that the zygote keeps forked, ready to be the ranks that are replaced next."""
    grace_s: float = 30.0
    hang_after_s: float = 30.0
    hang_timeout_s: float | None = None
    threads: int = 0
    """Intra-op threads per rank; 0 leaves the choice to the rank's own libraries."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    role: str = "default"
    devices: list[str] = []
    """The only device that each rank of a host sees, as its first; empty: all see all."""
    spare_devices: list[str] = []
    """Those of each host that no rank uses, to take the place of one that fails."""
    logs: str = ""
    """Another directory for the ranks' output than the run's own."""
    one_file: bool = False
    """stderr goes to the file of stdout: where both are shown as one, they keep their order."""
    log_bytes_max: int = 256 << 20
    fresh: bool = False
    """The directory was not asked for: if it exists the agent takes the next free name, one launch at a time."""
    detached: bool = False
    linger_s: float = 600.0
    store: bool = True
    """Serve torch's store for the ranks; False where this interpreter has no torch."""

    @property
    def size(self) -> int:
        size = 1
        for extent in self.dims.values():
            size *= extent
        return size

    @property
    def ranks_per_host(self) -> int:
        return self.size // self.nodes


def imports_id(launch: Launch) -> str:
    """Name what a zygote of this launch imports, and with which interpreter."""
    digest = hashlib.blake2s(digest_size=8)
    for part in (*launch.python, "", launch.fingerprint, "", *launch.preload):
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def rank_variables(
    launch: Launch, index: int, generation: int, port: int, address: str = "", device: str = ""
) -> dict[str, str]:
    """Argosy's own variables, and unless the launch is `alone` those that torchrun sets, with its meanings.

    `device` is the only one that the rank sees, if that is not the one of the launch.
    """
    own = {
        "ARGOSY_RUN_DIR": launch.directory,
        "ARGOSY_MESH": "main",
        "ARGOSY_GENERATION": str(generation),
        "ARGOSY_ALONE": "1" if launch.alone else "",  # Always set: a run may be launched from within another one.
    }
    if launch.alone:
        return own
    size, rank = str(launch.size), str(index)
    node, local_rank = divmod(index, launch.ranks_per_host)
    sees = device or (launch.devices[local_rank] if launch.devices else "")
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": rank,
        "GROUP_RANK": str(node),
        "ROLE_NAME": launch.role,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(launch.ranks_per_host),
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": str(launch.nodes),
        "MASTER_ADDR": address or launch.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.restart.max_restarts or 0),
        "TORCHELASTIC_RUN_ID": launch.name,
        "TORCHELASTIC_USE_AGENT_STORE": str(launch.store),
        **own,
        **({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": sees} if sees else {}),
    }


def rank_defaults(launch: Launch) -> dict[str, str]:
    """Variables for a rank that the user's own values override."""
    defaults: dict[str, str] = {}
    if not launch.alone:
        defaults = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    if launch.threads:
        defaults["OMP_NUM_THREADS"] = str(launch.threads)
    elif launch.size > 1:
        defaults["OMP_NUM_THREADS"] = "1"
    return defaults


def arguments(launch: Launch, local_rank: int) -> list[str]:
    """The script's arguments; torchrun fills in `${local_rank}`."""
    return launch.args if launch.alone else [arg.replace("${local_rank}", str(local_rank)) for arg in launch.args]


def command(launch: Launch, local_rank: int) -> list[str]:
    """What an executed rank executes."""
    args = arguments(launch, local_rank)
    if launch.kind == "program":
        return [launch.target, *args]
    return [*launch.python, *(["-m"] if launch.kind == "module" else []), launch.target, *args]
