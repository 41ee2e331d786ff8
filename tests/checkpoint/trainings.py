"""Trainings to be killed: processes that are forked warm, so that a thousand of them are affordable."""

import os
import select
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

import forked_calls
import msgspec
import numpy as np

from argosy.checkpoint import Keeping, KeepLast, Restored, Saver, StepNotFound, restore
from argosy.checkpoint.state_input import describe_arrays
from argosy.transfer import Member, State, replicated

CELLS = 300_001
PATIENCE_S = 60.0


def content(step: int) -> dict[str, np.ndarray]:
    """What a training holds at a step."""
    weight = np.random.default_rng(step).random(CELLS, np.float32)
    return {"weight": weight, "moment": -weight}


def is_saved(found: Restored, step: int) -> bool:
    """Whether what was restored is bitwise what a training held."""
    return all(found.tensors[name].numpy().tobytes() == array.tobytes() for name, array in content(step).items())


def described(state: Mapping[str, np.ndarray], rank: int, size: int) -> State:
    """The arrays as parameters that all ranks have."""
    found = describe_arrays(state)
    found.rank, found.size = rank, size
    for unit in found.units.values():
        member = unit.members["value"]
        layout = replicated(member.shape, tuple(range(size)))
        unit.members["value"] = Member("value", "parameter", member.dtype, layout, member.local)
    return found


def say(*words: object) -> None:
    os.write(1, msgspec.json.encode(words) + b"\n")


def train(directory: str, keeping: Keeping | None, env: Mapping[str, str]) -> None:
    """Restore, then save one step after the other until killed; every third is waited for."""
    say("pid", os.getpid())
    os.environ.update(env)
    rank, size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    if size > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.FileStore(env["RENDEZVOUS"], size), rank=rank, world_size=size)
    number, source = 0, "nothing"
    state = {name: np.zeros(CELLS, "<f4") for name in ("weight", "moment")}
    say("restoring")
    try:
        restored = restore(directory, into=described(state, rank, size))
        number, source = restored.step, restored.source
    except StepNotFound:
        pass
    saver = Saver(directory, keep=[KeepLast(2)], keeping=keeping)
    say("begun", number, source)
    while True:
        number += 1
        for name, array in content(number).items():
            state[name][:] = array
        say("saving", number)
        handle = saver.save(described(state, rank, size), number)
        handle.copied.result(60)
        say("copied", number)
        if number % 3 == 0:
            try:
                handle.wait(300)
                say("durable", number)
            except Exception as error:
                say("failed", number, str(error))


class Training:
    """A training in a process of its own, and what it says."""

    def __init__(self, directory: object, keeping: Keeping | None = None, **env: str) -> None:
        self._process = forked_calls.start(train, str(directory), keeping, env, stdout=subprocess.PIPE)
        assert self._process.stdout
        self._fd, self._heard = self._process.stdout.fileno(), b""
        (self._pid,) = self.until("pid")

    def until(self, word: str, number: int = 0) -> list[Any]:
        """Hear it up to this word and at least this number; returns what was said behind the word."""
        while (said := self._hear(PATIENCE_S)) is not None:
            first, *rest = said
            if first == word and (not number or rest[0] >= number):
                return rest
        raise AssertionError(f"no {word} {number} within {PATIENCE_S:g} s")

    def _hear(self, patience_s: float) -> list[Any] | None:
        """The next thing that it says; None if it says nothing for so long, or never again."""
        while b"\n" not in self._heard:
            data = os.read(self._fd, 1 << 16) if select.select([self._fd], [], [], patience_s)[0] else b""
            if not data:
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return msgspec.json.decode(line)

    def kill(self) -> int:
        """Kill -9; returns the last step that it said to be durable and was not heard yet, or 0."""
        os.kill(self._pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        durable = 0
        while (said := self._hear(0.0)) is not None:
            durable = said[1] if said[0] == "durable" else durable
        assert self._process.stdout
        self._process.stdout.close()
        return durable

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
