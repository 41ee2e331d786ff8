"""What an adapter keeps for a framework: attributes of its objects, and answers of functions that are asked once."""

import asyncio
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import torch
from trainings import Training

from argosy.train.adapters.attributes import Attributes
from argosy.train.adapters.kept_calls import kept_calls


class Counting:
    """As a trainer of somebody else counts."""

    def __init__(self) -> None:
        self.step, self.rollouts = 0, None
        self.averages: dict[str, Any] = {"train": defaultdict(list)}
        self.seen: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=2))
        self.model = torch.nn.Linear(1, 1)
        self.data = list(range(1_000_000))

    def go(self) -> None:
        self.step += 1
        self.rollouts: Any = [{"ids": torch.tensor([self.step]), "other": None}]
        self.averages["train"]["reward"].append(self.step / 2)
        self.seen["texts"].append(str(self.step))


def test_attributes_are_as_they_were_in_the_same_containers():
    counting = Counting()
    attributes, averages, model = Attributes(counting), counting.averages, counting.model
    counting.go()
    before = attributes.take()
    for _ in range(3):
        counting.go()
    counting.averages["eval"] = {}
    attributes.give(before)
    assert (counting.step, counting.rollouts[0]["ids"].tolist(), counting.model) == (1, [1], model)
    assert counting.averages is averages
    assert averages == {"train": {"reward": [0.5]}}
    assert counting.seen == {"texts": deque(["1"])}
    assert counting.seen["texts"].maxlen == 2


def test_another_object_takes_them_over():
    """As the trainer of a process that replaces another one."""
    old, new = Counting(), Counting()
    kept = Attributes(old)
    for _ in range(3):
        old.go()
    Attributes(new).give(kept.take())
    assert (new.step, new.rollouts, new.seen) == (3, old.rollouts, old.seen)
    assert new.seen["texts"].maxlen == 2
    assert new.seen["others"].maxlen == 2, "it makes values by itself as before"


def test_models_and_data_are_no_counters():
    assert {*Attributes(Counting(), without=["step"]).take()} == {"rollouts", "averages", "seen"}


def test_a_function_is_asked_once_for_a_step_that_is_repeated(tmp_path: Path):
    asked = list[tuple[int, str]]()
    training = Training(tmp_path, recheck=1)  # Each step is computed twice.

    def judge(texts: list[str], state: object) -> list[int]:
        asked.append((training.run.step, texts[0]))
        return [len(asked)]

    async def slow(texts: list[str]) -> list[int]:
        asked.append((training.run.step, texts[0]))
        return [-len(asked)]

    asking, asking_slowly, name = kept_calls(training.run, [judge, slow, "a name"])
    answers = list[Any]()
    for step in training.run.steps(until=2):
        with step:
            answers += [asking(["a"], state=step), asking(["a"], state=step)]  # Two questions of the same words.
            answers.append(asyncio.run(asking_slowly(["b"])))
            training.update(step)
    assert answers == [[1], [2], [-3], [1], [2], [-3], [4], [5], [-6], [4], [5], [-6]]
    assert asked == [(0, "a"), (0, "a"), (0, "b"), (1, "a"), (1, "a"), (1, "b")]
    assert (asking.__name__, name) == ("judge", "a name")


def test_other_samples_are_another_question(tmp_path: Path):
    training, drawn = Training(tmp_path, recheck=1), iter(range(9))
    asking = kept_calls(training.run, lambda number: number * 10)
    answers = list[int]()
    for step in training.run.steps(until=1):
        with step:
            answers.append(asking(next(drawn)))
            training.update(step)
    assert answers == [0, 10]
    assert asking(0) == 0, "nothing is kept outside a step"
