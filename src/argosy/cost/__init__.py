"""Prices: chips and links by file, what each operation and collective costs, and how a step unfolds in time."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.cost.chip import Chip as Chip
    from argosy.cost.chip import LinkLevel as LinkLevel
    from argosy.cost.chip import load_chip as load_chip
    from argosy.cost.chip import parse_chips as parse_chips
    from argosy.cost.chip import shipped as shipped
    from argosy.cost.engine import Deadlock as Deadlock
    from argosy.cost.engine import Task as Task
    from argosy.cost.engine import Timeline as Timeline
    from argosy.cost.engine import fold as fold
    from argosy.cost.engine import simulate as simulate
    from argosy.cost.pipeline import interleaved as interleaved
    from argosy.cost.pipeline import one_f_one_b as one_f_one_b
    from argosy.cost.pipeline import pipeline_time as pipeline_time
    from argosy.cost.prediction import INTERVAL as INTERVAL
    from argosy.cost.prediction import NO_GPU as NO_GPU
    from argosy.cost.prediction import Pieces as Pieces
    from argosy.cost.prediction import Prediction as Prediction
    from argosy.cost.prediction import estimate as estimate
    from argosy.cost.prediction import gradient_tail as gradient_tail
    from argosy.cost.prediction import pieces as pieces
    from argosy.cost.prediction import predict as predict
    from argosy.cost.prediction import tasks_of as tasks_of
    from argosy.cost.price import SPREAD as SPREAD
    from argosy.cost.price import hop_time as hop_time
    from argosy.cost.price import price_collective as price_collective
    from argosy.cost.price import price_op as price_op
    from argosy.cost.recipe import Recipe as Recipe
    from argosy.cost.scoring import CONSTANTS as CONSTANTS
    from argosy.cost.scoring import Score as Score
    from argosy.cost.scoring import leave_sizes_out as leave_sizes_out
    from argosy.cost.scoring import read_rows as read_rows
    from argosy.cost.scoring import score as score
    from argosy.cost.scoring import score_shipped as score_shipped
    from argosy.cost.trace import Collective as Collective
    from argosy.cost.trace import MemoryProfile as MemoryProfile
    from argosy.cost.trace import Op as Op
    from argosy.cost.trace import Trace as Trace
    from argosy.cost.trace import memory_profile as memory_profile

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
