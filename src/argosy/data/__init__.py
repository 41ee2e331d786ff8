"""The input of a training: every sample once per epoch, in an order that depends on neither ranks nor workers.

The state is one cursor. Workers are stateless and may die. A step that is retried gets the same batch. A queue holds
items that other processes make during the training.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.data.batch_makers import Threads as Threads
    from argosy.data.errors import SampleError as SampleError
    from argosy.data.errors import SourceChanged as SourceChanged
    from argosy.data.errors import TooManySkipped as TooManySkipped
    from argosy.data.errors import Unreadable as Unreadable
    from argosy.data.errors import WorkerLost as WorkerLost
    from argosy.data.jsonl import Jsonl as Jsonl
    from argosy.data.keyed_random import sample_rng as sample_rng
    from argosy.data.keyed_random import seed_generators as seed_generators
    from argosy.data.loader import Loader as Loader
    from argosy.data.microbatch import Skip as Skip
    from argosy.data.order import Shuffle as Shuffle
    from argosy.data.pack import Pack as Pack
    from argosy.data.pack import document_mask as document_mask
    from argosy.data.parquet import Parquet as Parquet
    from argosy.data.plan import Mix as Mix
    from argosy.data.processes import Processes as Processes
    from argosy.data.queue import Queue as Queue
    from argosy.data.shards import Shards as Shards
    from argosy.data.shards import merge_states as merge_states
    from argosy.data.tokens import Tokens as Tokens

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
