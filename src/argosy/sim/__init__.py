"""What-if: one recipe in depth on virtual time, with stragglers, other links and chips that do not exist yet."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.sim.step import StepWorld as StepWorld
    from argosy.sim.step import perfetto as perfetto
    from argosy.sim.step import rank_tasks as rank_tasks
    from argosy.sim.step import sim_step as sim_step
    from argosy.sim.step import slow_ranks as slow_ranks

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
