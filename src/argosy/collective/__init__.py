"""Process groups for torch that are fast on one host, name a missing rank, and survive the death of a rank.

Importing this room registers the backend `argosy` with torch.distributed.
"""

from argosy.collective.agent_store import open_agent_store
from argosy.collective.backend import joining, meet_when_needed, register
from argosy.collective.group import Group
from argosy.collective.guard import Guard, guard
from argosy.collective.latch import Latch
from argosy.collective.rendezvous import Superseded
from argosy.collective.request import CollectiveMismatch
from argosy.collective.torch_work import ConnectionLost

register()

__all__ = [
    "CollectiveMismatch",
    "ConnectionLost",
    "Group",
    "Guard",
    "Latch",
    "Superseded",
    "guard",
    "joining",
    "meet_when_needed",
    "open_agent_store",
    "register",
]
