"""The input of a training: every sample once per epoch, in an order that depends on neither ranks nor workers.

The state is one cursor; workers are stateless and may die; a step that is done again gets the same batch. A queue
holds what others make while the training runs.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.data.crew import Threads as Threads
    from argosy.data.errors import SampleError as SampleError
    from argosy.data.errors import SourceChanged as SourceChanged
    from argosy.data.errors import TooManySkipped as TooManySkipped
    from argosy.data.errors import Unreadable as Unreadable
    from argosy.data.errors import WorkerLost as WorkerLost
    from argosy.data.fill import Skip as Skip
    from argosy.data.jsonl import Jsonl as Jsonl
    from argosy.data.keyed import sample_rng as sample_rng
    from argosy.data.keyed import seed_generators as seed_generators
    from argosy.data.loader import Loader as Loader
    from argosy.data.order import Shuffle as Shuffle
    from argosy.data.packing import Pack as Pack
    from argosy.data.packing import document_mask as document_mask
    from argosy.data.parquet import Parquet as Parquet
    from argosy.data.plan import Mix as Mix
    from argosy.data.processes import Processes as Processes
    from argosy.data.queue import Queue as Queue
    from argosy.data.shards import Shards as Shards
    from argosy.data.shards import merge_states as merge_states
    from argosy.data.tokens import Tokens as Tokens

_HOMES = {
    name: f"argosy.data.{module}"
    for module, names in {
        "crew": "Threads",
        "errors": "SampleError SourceChanged TooManySkipped Unreadable WorkerLost",
        "fill": "Skip",
        "keyed": "sample_rng seed_generators",
        "loader": "Loader",
        "order": "Shuffle",
        "plan": "Mix",
        "processes": "Processes",
        "packing": "Pack document_mask",
        "queue": "Queue",
        "shards": "Shards merge_states",
        "tokens": "Tokens",
        "jsonl": "Jsonl",
        "parquet": "Parquet",
    }.items()
    for name in names.split()
}

__getattr__, __all__ = lazy(__name__, _HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
