"""Four ranks count steps together through the night; in the second life, rank 1 raises at step 8."""

import os
import time

import torch
import torch.distributed as dist


def load_shard(step: int) -> torch.Tensor:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and step == 8 and dist.get_rank() == 1:
        raise ValueError("corrupt shard: part-00017")
    return torch.ones(1)


def main() -> None:
    dist.init_process_group("gloo")
    for step in range(1, 10_000):
        total = load_shard(step)
        dist.all_reduce(total)
        print(f"rank {dist.get_rank()} step {step} total {int(total)}", flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
