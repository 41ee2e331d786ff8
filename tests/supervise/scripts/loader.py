"""DataLoaders whose workers use each of the start methods."""

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Squares(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        return torch.tensor([index, index**2])


def together(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items)


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method, collate_fn=together)
        for batch in loader:
            print(method, batch.tolist())
