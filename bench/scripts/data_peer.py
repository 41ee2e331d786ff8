"""One loader at one task, in a process of its own: prints one number.

    python data_peer.py TASK LOADER WORKERS DIRECTORY

Tasks: tokens, images, parquet, resume, handover.
Loaders: argosy, torch, stateful, grain, mosaic (which first writes its own shards).
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, BATCH = 1024, 32
ROWS_PER_GROUP = 1000


class TokenRows:
    """nanoGPT's get_batch as a Dataset, the file mapped once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens: Any = None
        self.count = (path.stat().st_size // 2 - 1) // LENGTH

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self.tokens is None:
            self.tokens = np.memmap(self.path, np.uint16, "r")
        row = self.tokens[index * LENGTH : index * LENGTH + LENGTH + 1].astype(np.int64)
        return row[:-1], row[1:]


class Images:
    def __init__(self, directory: Path) -> None:
        self.paths = sorted(map(str, directory.iterdir()))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return np.fromfile(self.paths[index], np.uint8)


class Large:
    """Each sample is 64 MiB that the worker has in memory."""

    def __init__(self) -> None:
        self.array: Any = None

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        if self.array is None:
            self.array = np.full((4096, 4096), 1.0, np.float32)
        return self.array


class Many:
    """`count` samples that cost nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def row_groups(directory: Path) -> Any:
    """What people write for Parquet: an IterableDataset that shuffles row groups and rows inside a buffer."""
    import pyarrow.parquet as parquet
    from torch.utils.data import IterableDataset, get_worker_info

    class Groups(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            file = parquet.ParquetFile(directory / "rows.parquet")
            info = get_worker_info()
            mine = range(info.id if info else 0, file.num_row_groups, info.num_workers if info else 1)
            for group in np.random.permutation(list(mine)):
                table = file.read_row_group(group)
                numbers, flat = table["n"].to_numpy(), table["v"].combine_chunks().flatten().to_numpy()
                vectors = flat.reshape(len(numbers), -1)
                for row in np.random.permutation(len(numbers)):
                    yield {"n": numbers[row], "v": vectors[row]}

    return Groups()


def source_of(task: str, directory: Path) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "tokens": lambda: TokenRows(directory / "tokens.bin"),
        "images": lambda: Images(directory / "images"),
        "handover": Large,
        "parquet": lambda: row_groups(directory),
        "resume": lambda: Many(1_000_000),
    }
    return makers[task]()


def argosy_loader(task: str, workers: int, directory: Path) -> Any:
    from argosy.data import Loader, Parquet, Shuffle, Tokens

    batch = 1 if task == "handover" else BATCH
    if task == "tokens":
        return Loader(Tokens(directory / "tokens.bin", LENGTH), batch, workers=workers)
    if task == "parquet":
        order = Shuffle.blocks(ROWS_PER_GROUP, 4)
        return Loader(Parquet(directory / "rows.parquet"), batch, workers=workers, shuffle=order)
    if task == "resume":
        loader = Loader(Many(10**9), batch, workers=workers)
        loader.load_state_dict({**loader.state_dict(), "cursor": 900_000_000, "step": 1})
        return loader
    return Loader(source_of(task, directory), batch, workers=workers)


def torch_loader(task: str, workers: int, directory: Path, *, stateful: bool) -> Any:
    from torch.utils.data import DataLoader

    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
    batch = 1 if task == "handover" else BATCH
    how: dict[str, Any] = {} if task == "parquet" else {"shuffle": True}
    loader = DataLoader(source_of(task, directory), batch_size=batch, num_workers=workers, **how)
    if task == "resume":  # A thousandth of the size: 900,000 of 1,000,000.
        state = loader.state_dict()
        rounds = 900_000 // BATCH
        for _, _ in zip(range(rounds), loader, strict=False):
            pass
        state = loader.state_dict()
        loader = DataLoader(source_of(task, directory), batch_size=batch, num_workers=workers, **how)
        loader.load_state_dict(state)
    return loader


def grain_loader(task: str, workers: int, directory: Path) -> Any:
    import grain

    data = grain.MapDataset.source(source_of(task, directory)).shuffle(seed=0).repeat()
    batch = 1 if task == "handover" else BATCH
    iterable = data.to_iter_dataset().batch(batch)
    if workers:
        iterable = iterable.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iterable


def mosaic_loader(task: str, workers: int, directory: Path) -> Any:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    class Rows(StreamingDataset):
        """Tokens are stored as they are in the file."""

        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)["x"]
            return row if task == "images" else (row[:-1].astype(np.int64), row[1:].astype(np.int64))

    source, shards = source_of(task, directory), directory / f"mosaic-{task}"
    if not shards.exists():
        with MDSWriter(out=str(shards), columns={"x": "ndarray"}) as out:
            for index in range(min(len(source), 16_384)):
                sample = source[index]
                out.write({"x": np.append(sample[0], sample[1][-1]).astype(np.uint16) if task == "tokens" else sample})
    data = Rows(local=str(shards), shuffle=True, batch_size=BATCH)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)


def touch(batch: Any) -> None:
    """Read a word of every page, as a training would."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    for part in batch if isinstance(batch, list | tuple) else [batch]:
        array = np.asarray(part)
        array.reshape(-1)[:: max(1, 4096 // array.itemsize)].sum()


def main() -> None:
    task, name, workers, directory = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    if name != "grain":
        import torch

        torch.set_num_threads(1)
    began = time.perf_counter()
    if name == "argosy":
        loader = argosy_loader(task, workers, directory)
    elif name == "grain":
        loader = grain_loader(task, workers, directory)
    elif name == "mosaic":
        loader = mosaic_loader(task, workers, directory)
    else:
        loader = torch_loader(task, workers, directory, stateful=name == "stateful")
    if task == "resume":
        began = time.perf_counter()
        touch(next(iter(loader)))
        print(time.perf_counter() - began)
        return
    rounds, per_batch = {"tokens": (300, BATCH * LENGTH / 1e6), "images": (100, BATCH / 1e3)}.get(task, (40, 1.0))
    rounds, per_batch = (300, BATCH / 1e3) if task == "parquet" else (rounds, per_batch)
    done, warm = 0, 8
    while done < rounds + warm:
        for batch in loader:
            touch(batch)
            del batch
            done += 1
            if done == warm:
                began = time.perf_counter()
            if done == rounds + warm:
                break
    print((time.perf_counter() - began) / rounds / per_batch)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
