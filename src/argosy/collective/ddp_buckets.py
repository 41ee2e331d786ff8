"""The bucket layouts of the DDP models of a process. Ranks with different layouts must not train together.

With two layouts of equal sizes the models would diverge without an error.
"""

import gc
import hashlib
import json
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from argosy.collective._torch import ddp_logging_data

_NAMES = ("rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices")


def ddp_models(group: Any) -> list[weakref.ref[Any]]:
    """Return the DDP models of this process that use `group`. Walks over all objects: too slow for every step.

    It asks the garbage collector for the referrers of DDP's class, because walking over the objects themselves would
    change their reference counts and so, in a forked process, copy their pages.
    """
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    if module is None:
        return []
    kinds = _with_subclasses(module.DistributedDataParallel)
    found = (each for each in gc.get_referrers(*kinds) if type(each) in kinds)
    return [weakref.ref(model) for model in found if model.__dict__.get("process_group") is group]


def _with_subclasses(kind: type) -> list[type]:
    return [kind, *(each for below in kind.__subclasses__() for each in _with_subclasses(below))]


def bucket_layout(models: Sequence[weakref.ref[Any]]) -> str:
    """Return a digest of the layouts; empty while some model has not built its final buckets."""
    alive = [model for held in models if (model := held()) is not None]
    found = [[str(ddp_logging_data(model).get(name, "")) for name in _NAMES] for model in alive]
    if not found or not all(text for texts in found for text in texts):
        return ""
    return hashlib.blake2s(json.dumps(found).encode(), digest_size=8).hexdigest()
