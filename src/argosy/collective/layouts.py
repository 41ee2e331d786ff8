"""How the DDP models of a process laid their gradients out in buckets: ranks that differ in it must not train together.

Two layouts of equal sizes would drift apart without an error.
"""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

import gc
import hashlib
import json
import sys
import weakref
from collections.abc import Sequence
from typing import Any

_NAMES = ("rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices")


def models_of(group: Any) -> list[weakref.ref[Any]]:
    """The DDP models of this process that use `group`: a walk over all objects, so not for every step.

    An object refers to its class, and the collector finds who does without touching the counts of all others, which
    in a forked process would copy the pages of all modules.
    """
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    if module is None:
        return []
    kinds = _with_subclasses(module.DistributedDataParallel)
    found = (each for each in gc.get_referrers(*kinds) if type(each) in kinds)
    return [weakref.ref(model) for model in found if model.__dict__.get("process_group") is group]


def _with_subclasses(kind: type) -> list[type]:
    return [kind, *(each for below in kind.__subclasses__() for each in _with_subclasses(below))]


def layout_of(models: Sequence[weakref.ref[Any]]) -> str:
    """A digest, the same on ranks that fit together; empty while some model has not settled its buckets."""
    alive = [model for held in models if (model := held()) is not None]
    found = [[str(model._get_ddp_logging_data().get(name, "")) for name in _NAMES] for model in alive]
    if not found or not all(text for texts in found for text in texts):
        return ""
    return hashlib.blake2s(json.dumps(found).encode(), digest_size=8).hexdigest()
