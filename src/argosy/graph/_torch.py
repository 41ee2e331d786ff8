"""The private names of torch that this room uses. A torch that lacks one fails here, at import."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportUnknownArgumentType=false

from operator import getitem as getitem
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass import (
    remat_using_tags_for_fwd_loss_bwd_graph as recompute_tagged,
)
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks as number_backward_nodes
from torch._guards import TracingContext as TracingContext
from torch._guards import tracing as tracing
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._inductor.fx_passes.bucketing import bucket_all_gather as bucket_all_gather
from torch._inductor.fx_passes.bucketing import bucket_reduce_scatter as bucket_reduce_scatter
from torch._inductor.fx_passes.post_grad import view_to_reshape as view_to_reshape
from torch._inductor.pattern_matcher import stable_topological_sort as stable_topological_sort
from torch._inductor.runtime.cache_dir_utils import default_cache_dir as default_cache_dir
from torch._ops import OpOverload as OpOverload
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnknownOperator
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor as LocalTensor
from torch.distributed._local_tensor import LocalTensorMode as LocalTensorMode
from torch.distributed.tensor import DTensor
from torch.fx import traceback as traceback
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as FakeTensorProp
from torch.nn.modules.module import register_module_forward_hook as register_module_forward_hook
from torch.nn.modules.module import register_module_forward_pre_hook as register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module as swap_in_buffers
from torch.optim._stateless import swap_in_optimizer_params_and_state as swap_in_optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.flop_counter import flop_registry as flop_registry

__all__ = [
    "DATA_DEPENDENT",
    "UnknownOperator",
    "c10d",
    "local_of",
    "memory_changes",
    "non_strict_tracing",
    "number_backward_nodes",
    "profiler_enabled",
    "recompute_tagged",
    "sharded_like",
    "swap_in_buffers",
    "swap_in_optimizer",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""Raised when the course of a program depends on the values of its tensors."""

c10d: Any = cast(Any, torch.ops)._c10d_functional
"""Collectives as operations without side effects."""

non_strict_tracing = cast(Any, torch.compiler)._non_strict_tracing_context


def local_of(value: Tensor) -> Tensor:
    """This rank's part of a DTensor, without the autograd node that `to_local` makes."""
    return cast(Any, value)._local_tensor if isinstance(value, DTensor) else value.detach()


def sharded_like(local: Tensor, other: Tensor) -> Tensor:
    """A DTensor with the layout of another; `DTensor.from_local` costs five times as much."""
    return DTensor(local, cast(Any, other)._spec, requires_grad=False)


def memory_changes(profile: Any) -> list[int]:
    """Bytes that were allocated (positive) and released, in order, while a profile with `profile_memory` ran."""
    return [int(event.nbytes()) for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]


def profiler_enabled() -> bool:
    """Whether somebody profiles already: two profilers at once are an error."""
    return bool(cast(Any, torch)._C._autograd._profiler_enabled())
