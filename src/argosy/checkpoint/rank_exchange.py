"""Who the ranks are, and how they tell each other something: through the store of their process group."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

import secrets
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec

from argosy import fabric
from argosy.core import ConfigError, DeadlinePassed


def is_in_group() -> bool:
    """Whether torch.distributed is initialised."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def place() -> tuple[int, int]:
    """(rank, size): torch.distributed's if it is initialised, else the launcher's."""
    if is_in_group():
        import torch.distributed as dist

        return dist.get_rank(), dist.get_world_size()
    found = fabric.here()
    return found.rank.index, found.size


def run_begun_at() -> float:
    """When the run began: by its record under a launcher, else now."""
    directory = fabric.here().directory
    try:
        record = msgspec.json.decode((directory / "run.json").read_bytes()) if directory else {}
        return float(record.get("started_at") or time.time())
    except (OSError, msgspec.MsgspecError):
        return time.time()


def session(size: int) -> str:
    """A name that all ranks of this launch share and no other launch has.

    Raises:
        ConfigError: there are several ranks, and no process group by which they could agree.
        DeadlinePassed: a rank did not come.
    """
    mine = secrets.token_hex(4)
    return exchanged(size, (mine, None))[0][0]


Answer = tuple[str, str | None]
EXCHANGE_TIMEOUT_S = 600.0
LOOK_S = 0.02
"""How often those who wait look again, at least."""
_rounds = 0
_series = ""
_alone = False


def begin_series(name: str) -> None:
    """Count rounds from the start, under a name: all ranks call it together when one of them has been replaced."""
    global _rounds, _series
    _rounds, _series = 0, f"{name}/"


@contextmanager
def alone() -> Generator[None]:
    """Restore without the other ranks: they have what this one lacks, or ended long ago."""
    global _alone
    _alone = True
    try:
        yield
    finally:
        _alone = False


def exchanged(size: int, answer: Answer, timeout_s: float = EXCHANGE_TIMEOUT_S) -> list[Answer]:
    """What each rank says, when all have arrived: through the process group's store, so whatever its backend.

    Raises:
        ConfigError: there are several ranks, and no process group.
        DeadlinePassed: a rank did not come; it is named.
        PeerLost: a rank died, and the process group is one that can tell.
    """
    if size == 1 or _alone:
        return [answer]
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigError(
            "several ranks, but torch.distributed is not initialised", hint="call init_process_group before"
        )
    if getattr(dist.group.WORLD, "state", "") == "joining":
        return [answer] * size  # As every operation of such a group: nobody is waited for.
    global _rounds
    _rounds += 1
    store: Any = dist.distributed_c10d._get_default_store()
    keys = [f"argosy/checkpoint/{_series}{_rounds}/{rank}" for rank in range(size)]
    store.set(keys[dist.get_rank()], msgspec.json.encode(answer))
    deadline, pause_s = time.monotonic() + timeout_s, 0.0005
    try:
        while not store.check(keys):
            _look_for_the_lost(dist.group.WORLD)
            if time.monotonic() > deadline:
                late = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise DeadlinePassed(f"waiting for rank {', '.join(late[:8])}", timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S)
    except (DeadlinePassed, KeyboardInterrupt):
        # A rank that comes later must find no old answer.
        store.delete_key(keys[dist.get_rank()])
        _rounds -= 1
        raise
    return [msgspec.json.decode(store.get(key), type=Answer) for key in keys]


def _look_for_the_lost(group: Any) -> None:
    """Raise the loss of a group of ours, if it has lost a rank; others cannot tell."""
    if hasattr(group, "check_loss"):
        group.check_loss()
        if group.loss is not None:
            raise group.loss
