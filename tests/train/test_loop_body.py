"""`run.loop`: the body of a loop as a function, in one process."""

from pathlib import Path

import pytest
import torch
from trainings import SAMPLES, Training

from argosy.core import ConfigError
from argosy.train import Run


class Body(Training):
    """A script whose loop is decorated; notes what happens before and after each update."""

    def __init__(self, directory: Path, **how: int) -> None:
        super().__init__(directory, **how)
        self.run.tracked.modules.clear()
        self.run.tracked.optimizers.clear()
        self.before, self.after = list[int](), list[int]()

    def go(self, numbers: range, breaks_at: int = -1) -> "Body":
        @self.run.loop(numbers, model=self.model, optimizer=self.optimizer)
        def train(number: int) -> None:
            self.before.append(number)
            rows = torch.randint(len(SAMPLES), (4,))  # As nanoGPT draws them: they depend on the step alone.
            self.model(torch.from_numpy(SAMPLES)[rows]).square().mean().backward()
            if number == breaks_at:
                raise ZeroDivisionError
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.after.append(number)

        assert train is None
        return self


def test_it_runs_all_steps_at_once_and_resumes(tmp_path: Path):
    whole = Body(tmp_path / "whole").go(range(9))
    assert whole.after == [*range(9)]
    Body(tmp_path / "parts").go(range(5))
    parts = Body(tmp_path / "parts").go(range(9))
    assert parts.after == [5, 6, 7, 8]
    assert parts.bits() == whole.bits()


def test_what_stands_behind_the_update_happens_for_steps_that_count(tmp_path: Path):
    body = Body(tmp_path, recheck=1).go(range(1, 4))  # Each step is computed twice.
    assert body.before == [1, 1, 2, 2, 3, 3]
    assert [number for number in body.after if number > 1] == [2, 3]


def test_a_script_begins_where_its_own_checkpoint_ends(tmp_path: Path):
    assert Body(tmp_path).go(range(3, 6)).after == [3, 4, 5]
    assert Body(tmp_path).go(range(3, 8)).after == [6, 7]


def test_an_exception_ends_the_run_as_in_a_loop(tmp_path: Path):
    with pytest.raises(ZeroDivisionError):
        Body(tmp_path).go(range(9), breaks_at=4)
    assert Body(tmp_path).go(range(9)).before == [4, 5, 6, 7, 8]


def test_only_a_range_of_consecutive_steps_is_taken(tmp_path: Path):
    for numbers in (range(0, 9, 2), 9):
        with pytest.raises(ConfigError, match=r"run\.loop takes a range of steps"):
            Run(tmp_path).loop(numbers)(lambda _: None)  # pyright: ignore[reportArgumentType]
