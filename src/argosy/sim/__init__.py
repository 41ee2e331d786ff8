"""What-if on virtual time: a training step on other chips, the goodput of a long run, a run on simulated hosts."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.sim.fleet.faults import HARSH as HARSH
    from argosy.sim.fleet.faults import PROFILES as PROFILES
    from argosy.sim.fleet.faults import Faults as Faults
    from argosy.sim.fleet.fleet import FleetPlan as FleetPlan
    from argosy.sim.fleet.fleet import FleetResult as FleetResult
    from argosy.sim.fleet.fleet import sim_fleet as sim_fleet
    from argosy.sim.fleet.lives import live as live
    from argosy.sim.fleet.lives import live_with_lost_hosts as live_with_lost_hosts
    from argosy.sim.fleet.lives import random_life as random_life
    from argosy.sim.fleet.sim_run import RunPlan as RunPlan
    from argosy.sim.fleet.sim_run import SimRun as SimRun
    from argosy.sim.fleet.world import Violation as Violation
    from argosy.sim.goodput import Fleet as Fleet
    from argosy.sim.goodput import Goodput as Goodput
    from argosy.sim.goodput import GoodputRange as GoodputRange
    from argosy.sim.goodput import choose_every as choose_every
    from argosy.sim.goodput import choose_spares as choose_spares
    from argosy.sim.goodput import sample_goodput as sample_goodput
    from argosy.sim.goodput import sim_goodput as sim_goodput
    from argosy.sim.pipeline_step import PipelineWorld as PipelineWorld
    from argosy.sim.pipeline_step import sim_pipeline as sim_pipeline
    from argosy.sim.step import StepWorld as StepWorld
    from argosy.sim.step import memory_counters as memory_counters
    from argosy.sim.step import perfetto as perfetto
    from argosy.sim.step import rank_tasks as rank_tasks
    from argosy.sim.step import sim_step as sim_step
    from argosy.sim.step import slow_ranks as slow_ranks

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
