"""Actors for the tests of calls: willing, slow, broken and hostile ones. Ranks import them from here."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import argosy


class Worker:
    """Does as it is told."""

    restored = False

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.seen = seed, list[int]()

    def square(self, x: int) -> int:
        return x * x

    @argosy.endpoint(idempotent=True)
    def pid(self) -> int:
        return os.getpid()

    def rank(self) -> int:
        return argosy.here().rank.index

    def generation(self) -> int:
        return argosy.here().rank.generation

    def note(self, x: int) -> None:
        self.seen.append(x)

    def notes(self) -> list[int]:
        return self.seen

    def echo(self, value: Any) -> Any:
        return value

    def total(self, array: Any) -> float:
        return float(array.sum())

    def scribble(self, array: Any) -> float:
        array[:] = 7
        return float(array.sum())

    def zeros(self, count: int) -> Any:
        return np.zeros(count, dtype=np.uint8)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def say(self, text: str) -> None:
        print(text)

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)


class Restorable(Worker):
    """Knows that it was replaced."""

    @classmethod
    def restore(cls, seed: int = 0) -> "Restorable":
        made = cls(seed)
        made.restored = True
        return made

    def was_restored(self) -> bool:
        return self.restored


class Company:
    """Ranks that wait for each other; the last one is killed the first time."""

    @argosy.endpoint(idempotent=True)
    def meet(self, gate: str) -> int:
        place = argosy.here()
        if place.rank.index == place.size - 1:
            if not place.rank.generation:
                os.kill(os.getpid(), signal.SIGKILL)
            open(gate, "w").close()
        while not os.path.exists(gate):
            time.sleep(0.01)
        return place.rank.generation


class Reluctant:
    """When it is replaced, it is ready only after it was let."""

    def __init__(self, gate: str) -> None:
        self.gate, self.seen = gate, list[int]()

    @classmethod
    def restore(cls, gate: str) -> "Reluctant":
        while not os.path.exists(gate):
            time.sleep(0.01)
        return cls(gate)

    def note(self, x: int) -> int:
        self.seen.append(x)
        return x

    def notes(self) -> list[int]:
        return self.seen

    @argosy.endpoint(idempotent=True)
    def pid(self) -> int:
        return os.getpid()


class Awkward:
    """Misbehaves."""

    def lock(self) -> Any:
        return {"inner": [threading.Lock()]}

    def raise_unpicklable(self) -> None:
        class Odd(Exception):
            def __init__(self, a: int, b: int) -> None:
                super().__init__("odd indeed")
                self.lock = threading.Lock()

        raise Odd(1, 2)

    def generate(self) -> Iterator[int]:
        yield 1

    def leave(self, code: int) -> None:
        sys.exit(code)

    def leave_at_once(self, code: int) -> None:
        os._exit(code)

    def fork(self) -> int:
        child = os.fork()
        if child == 0:
            time.sleep(3)
        return child

    def fork_and_die(self) -> None:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def flood(self, size: int) -> bytes:
        return b"x" * size

    def block(self) -> None:
        while True:
            time.sleep(1000)

    def spin(self) -> None:
        while True:
            pass

    def ready(self) -> bool:
        return True


class Irreparable(Worker):
    """Fails whenever it is built again."""

    @classmethod
    def restore(cls, *args: Any) -> "Irreparable":
        raise RuntimeError("the disk with my state is gone")


class Options:
    """Has endpoints that a handle has too."""

    def options(self) -> str:
        return "mine"


class Beside:
    """Has endpoints that run beside each other."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def hold(self) -> bool:
        return self.event.wait(60)

    @argosy.endpoint(concurrent=True)
    def release(self) -> None:
        self.event.set()

    async def dream(self, seconds: float) -> str:
        import asyncio

        await asyncio.sleep(seconds)
        return "dreamt"


class Twins(Worker):
    """A worker that can sleep twice at a time."""

    @argosy.endpoint(concurrent=True)
    def sleep(self, seconds: float) -> str:
        return super().sleep(seconds)


class Caller:
    """Calls others."""

    def ask(self, other: Any, x: int) -> int:
        return other.square(x).get()

    def circle(self, other: Any, me: Any, depth: int) -> int:
        return 0 if depth == 0 else 1 + other.circle(me, other, depth - 1).get()

    def mesh_of_my_own(self) -> list[int]:
        self.cluster = argosy.local(show=False)
        workers = self.cluster.mesh(ranks=2, preload=[]).spawn(Worker)
        return workers.pid().gather()

    def look_up(self, name: str) -> int:
        return argosy.connect().find(name).port

    def pid(self) -> int:
        return os.getpid()
