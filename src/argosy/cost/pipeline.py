"""Pipeline schedules as data: for each stage, the order in which it runs forward and backward passes."""

from argosy.core import ConfigError
from argosy.cost.engine import Task, simulate

Slot = tuple[str, int, int]
"""`F` or `B`, the micro-batch, the chunk of layers."""


def one_f_one_b(stages: int, stage: int, micros: int) -> list[Slot]:
    """Fill the pipeline, then alternate, then drain; at most `stages - stage` micro-batches are kept at once."""
    ahead = min(stages - stage - 1, micros)
    order = [("F", micro, 0) for micro in range(ahead)]
    for micro in range(micros - ahead):
        order += [("F", micro + ahead, 0), ("B", micro, 0)]
    return order + [("B", micro, 0) for micro in range(micros - ahead, micros)]


def interleaved(stages: int, stage: int, micros: int, chunks: int) -> list[Slot]:
    """Megatron's interleaved order: each stage has several chunks of layers, and micro-batches go in groups."""
    if micros % stages:
        raise ConfigError(f"an interleaved pipeline needs micro-batches in multiples of {stages}: {micros}")
    total = micros * chunks

    def slot(kind: str, number: int) -> Slot:
        group, inside = divmod(number, stages * chunks)
        chunk, micro = divmod(inside, stages)
        return kind, group * stages + micro, chunk if kind == "F" else chunks - 1 - chunk

    ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    order = [slot("F", number) for number in range(ahead)]
    for number in range(total - ahead):
        order += [slot("F", number + ahead), slot("B", number)]
    return order + [slot("B", number) for number in range(total - ahead, total)]


def pipeline_time(forward: list[float], backward: list[float], micros: int, hop_s: float, chunks: int = 1) -> float:
    """Seconds of all micro-batches; `forward` and `backward` are those of one micro-batch on each stage, all chunks."""
    stages = len(forward)
    if stages == 1:
        return micros * (forward[0] + backward[0])
    keys: dict[tuple[str, int, int, int], int] = {}
    listed: list[tuple[int, Slot]] = []
    for stage in range(stages):
        order = one_f_one_b(stages, stage, micros) if chunks == 1 else interleaved(stages, stage, micros, chunks)
        for slot in order:
            keys[(slot[0], slot[1], slot[2], stage)] = len(listed)
            listed.append((stage, slot))
    tasks: list[Task] = []
    for stage, (kind, micro, chunk) in listed:
        seconds = (forward if kind == "F" else backward)[stage] / chunks
        needs = [keys[before] for before in previous(kind, micro, chunk, stage, stages, chunks)]
        tasks.append(Task(f"{kind}{micro}.{chunk}@{stage}", seconds + hop_s, (stage,), tuple(needs)))
    return simulate(tasks).end


def previous(
    kind: str, micro: int, chunk: int, stage: int, stages: int, chunks: int
) -> list[tuple[str, int, int, int]]:
    """The pass whose result this one waits for."""
    if kind == "F":
        if stage > 0:
            return [("F", micro, chunk, stage - 1)]
        return [("F", micro, chunk - 1, stages - 1)] if chunk > 0 else []
    if stage < stages - 1:
        return [("B", micro, chunk, stage + 1)]
    return [("B", micro, chunk + 1, 0)] if chunk < chunks - 1 else [("F", micro, chunk, stage)]
