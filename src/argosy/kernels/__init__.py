"""Ops with contracts: a reference in plain torch, a custom op, its cost, its cases; `check` does all the testing."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.kernels.contract import Kernel as Kernel
    from argosy.kernels.contract import RuleBroken as RuleBroken
    from argosy.kernels.contract import check as check
    from argosy.kernels.cross_entropy.op import LINEAR_CROSS_ENTROPY as LINEAR_CROSS_ENTROPY
    from argosy.kernels.cross_entropy.op import linear_cross_entropy as linear_cross_entropy
    from argosy.kernels.norm.op import FINITE_NORM as FINITE_NORM
    from argosy.kernels.norm.op import finite_norm as finite_norm
    from argosy.kernels.token_logprob.op import LINEAR_TOKEN_LOGPROB as LINEAR_TOKEN_LOGPROB
    from argosy.kernels.token_logprob.op import linear_token_logprob as linear_token_logprob

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
