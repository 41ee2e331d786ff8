"""torchdata's StatefulDataLoader as a source: batches come again after a rollback; a resume reads no old ones."""

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset

from argosy.data import Loader, Shards

pytestmark = pytest.mark.system
RANKS, SAMPLES, BATCH, STEPS = 2, 24, 4, 8


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, read: list[int]) -> None:
        self.read = read

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor(index)


def loader(rank: int, workers: int, read: list[int]) -> Loader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def open_part(shard: int, shards: int, epoch: int) -> Any:
        part = Subset(Numbers(read), range(shard, SAMPLES, shards))
        order = torch.Generator().manual_seed(epoch)
        return StatefulDataLoader(part, batch_size=BATCH, shuffle=True, num_workers=workers, generator=order)

    found = Loader(Shards(open_part, RANKS), batch=RANKS, micro=1, collate=lambda items: items[0])
    found.place(rank, RANKS)
    return found


def take(data: Loader, steps: int) -> list[list[int]]:
    taken: list[list[int]] = []
    for _ in range(steps):
        for _ in range(2):  # The first attempt is rolled back.
            attempt = [batch.tolist() for batch in data.batches()]
        taken += attempt
        data.commit()
    return taken


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_has_its_own_batches_and_resumes_at_any_of_them(workers: int):
    whole = [take(loader(rank, workers, []), STEPS) for rank in range(RANKS)]
    parts = [whole[rank][first : first + 3] for first in (0, 3) for rank in range(RANKS)]
    epochs = [[number for batch in part for number in batch] for part in parts]
    assert [sorted(epoch) for epoch in epochs] == 2 * [[*range(0, SAMPLES, 2)], [*range(1, SAMPLES, 2)]]
    assert epochs[0] != epochs[2], "each epoch has its own order"
    for at in range(STEPS) if not workers else (2, 3):
        first, read = loader(1, workers, []), list[int]()
        begun = take(first, at)
        resumed = loader(1, workers, read)
        resumed.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        assert begun + take(resumed, STEPS - at) == whole[1]
        if not workers:
            assert len(read) == (STEPS - at) * BATCH, "what came before is not read again"
