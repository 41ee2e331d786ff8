"""Two ranks restore; what one of them alone cannot do, both are told."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from argosy.checkpoint import CorruptShard, Saver, StepNotFound, restore
from argosy.core import ConfigError, DeadlinePassed


def raised(call: object, kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def run(work: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(f"{work}/store", 2), rank=rank, world_size=2)
    model = torch.nn.Linear(8, 8)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    with Saver(f"{work}/run") as saver:
        saver.save(model, 1).wait(300)
        for parameter in model.parameters():
            parameter.data += 1
        saver.save(model, 2).wait(300)

    # Rank 1 alone sees a directory without the newest step: both take the older one.
    mine = Path(f"{work}/copy{rank}")
    os.system(f"cp -r {work}/run {mine}")
    if rank == 1:
        os.system(f"rm -r {mine}/checkpoints/step-000000000002-*")
    assert restore(mine, into=model, timeout_s=300).step == 1

    # Rank 1 alone finds a step damaged: both pass it over, and both fail if it was asked for.
    other = Path(f"{work}/flipped{rank}")
    os.system(f"cp -r {work}/run {other}")
    if rank == 1:
        for segment in other.glob("checkpoints/step-000000000002-*/*.safetensors"):
            data = bytearray(segment.read_bytes())
            data[4096] ^= 1
            segment.write_bytes(data)
    found = restore(other, into=model, timeout_s=300)
    assert found.step == 1
    assert "digest mismatch" in str(found)
    assert "digest mismatch" in raised(lambda: restore(other, into=model, step=2, timeout_s=300), CorruptShard)

    # Rank 1 alone has another model, or something that is no state, or no files at all.
    odd = torch.nn.Linear(8, 9) if rank else model
    text = raised(lambda: restore(f"{work}/run", into=odd, timeout_s=300), ConfigError)
    assert "has shape [8, 8], here it is [9, 8]" in text or "has shape [8], here it is [9]" in text
    text = raised(lambda: restore(f"{work}/run", into=3 if rank else model, timeout_s=300), ConfigError)
    assert "a state is a module" in text
    raised(lambda: restore(f"{work}/nothing" if rank else f"{work}/run", into=model, timeout_s=300), StepNotFound)

    # Each asks for another step: both are told at once, whether it is there or not.
    for steps in ((1, 2), (1, 3)):
        text = raised(lambda: restore(f"{work}/run", into=model, step=steps[rank], timeout_s=300), ConfigError)  # noqa: B023
        assert text == f"ranks ask for different steps: 1 on rank 0, {steps[1]} on rank 1"

    # A rank that does not come is named at the deadline.
    if rank == 0:
        text = raised(lambda: restore(f"{work}/run", into=model, timeout_s=1), DeadlinePassed)
        assert text == "timed out after 1 s: waiting for rank 1"
    dist.barrier()
    # A saver whose directory is another run's is refused on all ranks.
    other_run = Path(f"{work}/taken")
    if rank == 0:
        (other_run / "checkpoints").mkdir(parents=True)
        (other_run / "checkpoints/owner.json").write_text('{"host":"x","pid":1,"started_at":0,"session":"s"}')
    dist.barrier()
    assert "a run on x" in raised(lambda: Saver(other_run), ConfigError)
    save_what_differs(work, rank)


def save_what_differs(work: str, rank: int) -> None:
    # Statistics of each rank's own batches: all are saved as rank 0 has them, not some of each rank.
    norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(3) for _ in range(4))
    for norm in norms:
        norm.running_mean.fill_(rank + 1)
        norm.running_var.fill_(rank + 1)
    with Saver(f"{work}/norms") as saver:
        saver.save(norms, 1).wait(300)
    restore(f"{work}/norms", into=norms, timeout_s=300)
    assert all(float(norm.running_mean[0]) == float(norm.running_var[0]) == 1.0 for norm in norms)

    # A plain tensor that only one rank has would be written by nobody: the save fails, and says so.
    stages = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(2, 2)})
    with Saver(f"{work}/stages", say=lambda _: None) as saver:
        text = raised(lambda: saver.save(stages, 1).wait(300), Exception)
        assert "rank 1 has other plain tensors than rank 0" in text, text
