"""What a run has to know of torch's wrappers: when gradients are exchanged, and what a constructor would have sent."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Parallel:
    """The DDP and FSDP2 modules among the tracked ones."""

    def __init__(self) -> None:
        self.replicas: list[Any] = []
        self.sharded: list[Any] = []
        self._exchanged = True

    def find(self, roots: Iterable[nn.Module]) -> None:
        modules = [module for root in roots for module in root.modules()]
        self.replicas = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self.sharded = [root for root in modules if hasattr(root, "set_requires_gradient_sync")]

    def exchange_gradients(self, wanted: bool) -> None:
        """Whether the next backward pass exchanges its gradients."""
        if wanted == self._exchanged:
            return
        self._exchanged = wanted
        for module in self.replicas:
            module.require_backward_grad_sync = wanted
        for module in self.sharded:
            module.set_requires_gradient_sync(wanted, recurse=False)

    def begin_alike(self) -> None:
        """Give every replica rank 0's parameters and buffers, as DDP's constructor does if it can reach the others."""
        for replica in self.replicas:
            for tensor in [*replica.module.parameters(), *replica.module.buffers()]:
                dist.broadcast(tensor.detach(), 0, group=replica.process_group)
