"""One graph of a training step: captured from the user's model, rewritten by passes that prove themselves, run."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.graph.certificate import Certificate as Certificate
    from argosy.graph.certificate import apply_passes as apply_passes
    from argosy.graph.certificate import bisect as bisect
    from argosy.graph.chakra import chakra_bytes as chakra_bytes
    from argosy.graph.compiled import CompiledStep as CompiledStep
    from argosy.graph.compiled import compile as compile
    from argosy.graph.errors import BadGraph as BadGraph
    from argosy.graph.errors import CannotCapture as CannotCapture
    from argosy.graph.lowering import lower as lower
    from argosy.graph.measure_chip import ChipFigures as ChipFigures
    from argosy.graph.measure_chip import chip_toml as chip_toml
    from argosy.graph.measure_chip import measure as measure
    from argosy.graph.passes import PASSES as PASSES
    from argosy.graph.passes import graph_diff as graph_diff
    from argosy.graph.passes import select_passes as select_passes
    from argosy.graph.planner import Planner as Planner
    from argosy.graph.planner import Refused as Refused
    from argosy.graph.planner import plan as plan
    from argosy.graph.simulate import run_ranks as run_ranks
    from argosy.graph.step_capture import StepGraph as StepGraph
    from argosy.graph.step_capture import capture as capture
    from argosy.graph.step_capture import capture_optimizer as capture_optimizer
    from argosy.graph.training import Training as Training
    from argosy.graph.training import load_training as load_training

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
