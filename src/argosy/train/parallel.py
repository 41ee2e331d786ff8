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

    def build_buckets(self) -> None:
        """Have every DDP module build its final buckets now, while its group answers locally.

        DDP builds them when a module is used for the second time, in the order in which gradients arrived, and tells
        the other ranks. A rank that joins later would do so alone. So all ranks do it here, in the order of the
        parameters from last to first, which is what DDP assumes before it knows better.
        """
        for module in self.replicas:
            if module.static_graph or module.mixed_precision or module._use_python_reducer or module._comm_hooks:
                continue  # Built otherwise, or by a hook that would remember it: a replaced rank rehearses.
            if module.find_unused_parameters:
                continue  # Never built.
            reducer, parameters = module.reducer, module._module_parameters
            reducer.prepare_for_forward()
            reducer.prepare_for_backward([])
            for parameter in reversed([each for each in parameters if each.requires_grad]):
                (parameter.sum() * 0).backward()
            for parameter in parameters:
                parameter.grad = None
            module._has_rebuilt_buckets = reducer._rebuild_buckets()
            module.logger.set_runtime_stats_and_log()

    def begin_step(self) -> None:
        """Have the first forward pass send rank 0's buffers, whatever passes this rank has made before.

        DDP skips that after a pass without gradients, an evaluation's, because nothing has changed since. A replaced
        rank makes other passes than the rest before its first step.
        """
        for module in self.replicas:
            module.require_forward_param_sync = True

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
