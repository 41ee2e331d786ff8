"""A run of one process that takes items from a queue: acknowledged by steps that count, and again where they do not."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest
import torch
from console import PATIENCE_S, Console, until
from torch import nn

from argosy.checkpoint import list_steps
from argosy.core import DeadlinePassed
from argosy.data import Loader, Queue
from argosy.train import Run


class Training:
    """A run that learns from numbers in a queue, and notes which ones each attempt had."""

    def __init__(self, directory: Path, *, save_every: int = 3, patience_s: float = 30.0) -> None:
        self.run = Run(directory, seed=1, save_every=save_every)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.run.track(model=self.model, optimizer=self.optimizer)
        self.queue = Queue(directory / "queue", batch=2, capacity=100, patience_s=patience_s)
        self.had: list[tuple[int, list[float]]] = []
        self.kept: list[int] = []
        """How many items that were taken are still there, after each checkpoint."""

    def fill(self, count: int) -> "Training":
        for number in range(count):
            self.queue.put(float(number))
        return self

    def sail(
        self, until: int, *, breaks_at: int | None = None, rejects: int | None = None, told_at: int | None = None
    ) -> "Training":
        for step in self.run.steps(until=until):
            if step.number == told_at:
                Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with step:
                items: list[float] = step.batch(self.queue)
                self.had.append((step.number, items))
                loss = self.model(torch.tensor(items)[:, None]).square().mean()
                (loss * float("nan") if step.number == rejects else loss).backward()
                if step.number == breaks_at:
                    raise ZeroDivisionError
                self.optimizer.step()
            if step.every(3):
                self.run.saves.flush()
                self.kept.append(len(list((self.queue.directory / "taken").iterdir())))
        return self

    def bits(self) -> bytes:
        return b"".join(parameter.detach().numpy().tobytes() for parameter in self.model.parameters())


def test_an_attempt_that_fails_gives_its_items_back(tmp_path: Path):
    calm = Training(tmp_path / "calm").fill(12).sail(6)
    first = Training(tmp_path / "hard").fill(12)
    with pytest.raises(ZeroDivisionError):
        first.sail(6, breaks_at=4)
    again = Training(tmp_path / "hard").sail(6)
    assert (first.had[-1], again.had[0]) == ((4, [8.0, 9.0]), (4, [8.0, 9.0]))
    assert again.bits() == calm.bits()


def test_after_a_resume_the_items_since_the_checkpoint_come_again(tmp_path: Path):
    first = Training(tmp_path).fill(12)
    first.sail(5)  # Its checkpoints are those of steps 3 and 5.
    for path in (tmp_path / "checkpoints").glob("step-*05-*"):
        path.rename(tmp_path / path.name)  # As if it had never been written.
    (tmp_path / "finished.json").unlink()
    again = Training(tmp_path).sail(6)
    assert again.had == [(3, [6.0, 7.0]), (4, [8.0, 9.0]), (5, [10.0, 11.0])]


def test_items_that_checkpoints_count_are_deleted(tmp_path: Path):
    training = Training(tmp_path).fill(60).sail(30)
    assert training.kept == [6] * 10, "those since the checkpoint before"
    assert [items for _, items in training.had] == [[2.0 * n, 2.0 * n + 1] for n in range(30)]


def test_a_step_that_is_left_out_has_used_its_items(tmp_path: Path):
    training = Training(tmp_path).fill(6).sail(3, rejects=1)
    assert training.had == [(0, [0.0, 1.0]), (1, [2.0, 3.0]), (2, [4.0, 5.0])]


def test_a_loader_and_a_queue_in_one_step(tmp_path: Path):
    training, numbers = Training(tmp_path).fill(6), Loader(range(100), batch=2)
    for step in training.run.steps(until=2):
        with step:
            step.batch(numbers)
            step.batch(training.queue)
    assert (numbers.cursor, training.queue.cursor) == (4, 4)


def test_items_that_do_not_come_end_the_run_with_a_hint(tmp_path: Path):
    with pytest.raises(DeadlinePassed, match="2 items in the queue queue") as caught:
        Training(tmp_path, patience_s=0.2).fill(3).sail(2)
    assert caught.value.hint == "1 are there: check that a process puts items"


def test_told_to_leave_while_it_waits_for_items_it_saves_and_leaves(tmp_path: Path):
    training = Training(tmp_path, save_every=100).fill(4)
    with pytest.raises(SystemExit) as caught:
        training.sail(9, told_at=2)
    assert caught.value.code == 128 + signal.SIGTERM
    again = Training(tmp_path).fill(2).sail(3)
    assert [number for number, _ in again.had] == [2]


@pytest.mark.system
def test_ranks_told_to_leave_while_they_wait_for_items_save_and_leave(console: Console):
    directory, out = console.cwd / "run", console.cwd / "said"
    queue = Queue(directory / "queue", batch=6, capacity=100)
    for number in range(18):
        queue.put(number)
    script = str(Path(__file__).parent / "scripts" / "queued.py")
    command = console.start("run", "-n", "2", script, str(directory), "train", "12", out=out)
    items = [directory / f"items.{rank}" for rank in (0, 1)]
    until(lambda: all(path.exists() and len(path.read_text().splitlines()) == 3 for path in items), "three steps")
    command.send_signal(signal.SIGTERM)
    assert command.wait(PATIENCE_S) == 128 + signal.SIGTERM, out.read_text()
    assert [step.step for step in list_steps(directory)] == [3], out.read_text()
    assert out.read_text().count("saved step 3") == 1


def test_several_producers_and_a_consumer_that_dies_between_taking_and_committing(console: Console):
    """With room for one batch only. Each item counts once; `put` waits, and nobody for ever."""
    directory, steps = console.cwd / "run", 12
    directory.mkdir()
    script = [sys.executable, str(Path(__file__).parent / "scripts" / "queued.py"), str(directory)]
    putting = [
        subprocess.Popen([*script, "put", str(first), "24"], env=console.env, cwd=console.cwd) for first in (0, 24, 48)
    ]
    ended = console.argosy("run", "-n", "2", *script[1:], "train", str(steps), "1:6")
    assert ended.code == 0, ended.text
    assert "restarting rank 1" in ended.text
    assert [each.wait(PATIENCE_S) for each in putting] == [0, 0, 0]
    counted: dict[tuple[str, int], list[int]] = {}
    for path in directory.glob("items.*"):
        for line in path.read_text().splitlines():
            number, *items = map(int, line.split())
            assert counted.setdefault((path.name, number), items) == items, "the same on every attempt"
    assert sorted(item for items in counted.values() for item in items) == list(range(72))
