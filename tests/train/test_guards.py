"""What a run says to a script that makes a mistake, or whose numbers go wrong: in one process without a launcher."""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Training

from argosy.checkpoint import list_steps
from argosy.cli.ckpt import once
from argosy.core import ConfigError
from argosy.data import Loader
from argosy.train import Diverged, Spike, Step, read_log, scribe
from argosy.train.checkpoint_schedule import seldom


def test_numbers_that_are_never_finite_end_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    training = Training(tmp_path)
    with pytest.raises(Diverged, match="100 steps in a row changed nothing, up to step 109") as caught:
        training.sail(200, lambda step: training.update(step, 1.0 if step.number < 10 else float("nan")))
    assert "learning rate" in caught.value.hint
    assert capfd.readouterr().err.count("skipped step") == 3 + 10


def test_numbers_that_are_finite_again_are_forgiven(tmp_path: Path):
    training = Training(tmp_path)
    training.sail(250, lambda step: training.update(step, float("nan") if step.number % 100 else 1.0))
    assert training.run.step == 250


def test_how_many_were_left_out_is_known_after_a_resume(tmp_path: Path):
    training = Training(tmp_path)
    training.sail(60, lambda step: training.update(step, float("nan")))
    training = Training(tmp_path)
    with pytest.raises(Diverged, match="up to step 99"):
        training.sail(200, lambda step: training.update(step, float("nan")))


def scaled(training: Training, factor: float) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    training.run.track(scaler=scaler)

    def work(step: Step) -> None:
        loss = training.model(step.batch(training.data)).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()

    return work


def test_a_scaler_that_never_lets_the_optimizer_step_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    training = Training(tmp_path)
    with pytest.raises(Diverged, match="up to step 99"):
        training.sail(200, scaled(training, float("nan")))
    assert "no optimizer used" not in capfd.readouterr().err


def test_gradients_that_nobody_uses_are_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    training = Training(tmp_path)
    training.sail(12, lambda step: training.model(step.batch(training.data)).square().mean().backward())
    said = capfd.readouterr().err
    assert said.count("3 steps, up to step 2, made gradients that no optimizer used") == 1
    assert "call optimizer.step() inside `with step:`" in said


def test_evaluation_and_accumulation_are_no_mistakes(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    training = Training(tmp_path)
    data = Loader(torch.randn(40, 4).numpy(), batch=4, micro=1)

    def work(step: Step) -> None:
        if step.number % 2:
            with torch.no_grad():
                training.run.log(loss=training.model(step.batch(training.data)).mean())
            return
        for batch in step.batches(data):
            (training.model(batch).square().mean() * step.scale).backward()
        training.optimizer.step()

    training.sail(12, work)
    assert "optimizer" not in capfd.readouterr().err


def test_a_run_may_have_one_loop_after_another(tmp_path: Path):
    training = Training(tmp_path / "parts").sail(5).sail(12)
    assert training.bits() == Training(tmp_path / "whole").sail(12).bits()
    assert [each.step for each in list_steps(tmp_path / "parts")][:2] == [12, 8]


def test_what_the_state_can_hold_comes_back_as_it_was(tmp_path: Path):
    training = Training(tmp_path)
    held = {"pair": (1, 2.5), "deep": {"list": [None, True, "a"], 3: ("x", [])}, "inf": float("inf")}

    def work(step: Step) -> None:
        training.run.state.update(held, tensor=torch.arange(3))
        training.update(step)

    training.sail(4, work)
    training = Training(tmp_path)
    for step in training.run.steps(until=5):
        found = dict(training.run.state)
        assert torch.equal(found.pop("tensor"), torch.arange(3))
        assert found == held
        assert type(found["pair"]) is tuple
        with step:
            training.update(step)


def test_what_the_state_cannot_hold_is_refused_with_what_it_can(tmp_path: Path):
    training = Training(tmp_path)

    def work(step: Step) -> None:
        training.run.state["seen"] = {1, 2}
        training.update(step)

    with pytest.raises(ConfigError, match=r"run.state.seen cannot be kept: it is a set") as caught:
        training.sail(8, work)
    assert "lists, tuples and dicts" in caught.value.hint


def test_a_rewind_finds_what_the_policy_needs_though_only_three_checkpoints_are_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    policy = Spike(over=3.0, window=5, then="rewind", back=20)
    training = Training(tmp_path, save_every=2, spike=policy)

    def work(step: Step) -> None:
        step.check(1000.0 if step.number == 50 and not training.run.ledger.eras else 1.0)
        training.update(step)

    training.sail(60, work)
    found = capfd.readouterr().err.split("rolled back from step 51 to step ")[1].split(" ")[0]
    assert 20 <= int(found) <= 30
    assert len(list_steps(tmp_path)) <= 12


def test_a_step_that_is_saved_twice_is_listed_once(tmp_path: Path):
    training = Training(tmp_path)
    for step in training.run.steps(until=12):
        with step:
            training.update(step)
        if step.every(4):
            training.run.save("mine")
    assert [(each.step, each.tags) for each in once(list_steps(tmp_path))] == [(n, ["mine"]) for n in (12, 8, 4)]


def test_mistakes_come_with_what_to_do(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match="tracked already") as twice:
        training.run.track(model=training.model)
    with pytest.raises(ConfigError, match="the source is empty") as empty:
        Loader(torch.zeros(0, 4).numpy(), batch=4)
    assert "under a name of its own" in twice.value.hint
    assert "matches files" in empty.value.hint


def test_a_directory_that_is_removed_is_said_once_and_made_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    training = Training(tmp_path / "run")

    def work(step: Step) -> None:
        if step.number == 6:
            training.run.saves.flush()
            shutil.rmtree(tmp_path / "run")
            time.sleep(scribe.LOOK_S)
        training.update(step)

    training.sail(12, work)
    assert capfd.readouterr().err.count("was removed around step 7") == 1
    assert [row.step for row in read_log(tmp_path / "run")] == list(range(7, 13))
    assert [each.step for each in list_steps(tmp_path / "run")] == [12, 8]


def test_the_same_trouble_is_told_now_and_then():
    told: list[str] = []
    now = 0.0
    say = seldom(told.append, lambda: now)
    for number in range(100):
        now = float(number)
        say(f"step {number}: no room at '/x/step-{number}'; retrying in {number / 2} s")
        say(f"step {number}: permission denied")
    assert len(told) == 2 * 4


def caught(training: Training, *, first: bool) -> None:
    """A script that goes on after an exception of its own."""
    tries: list[int] = []
    for step in training.run.steps(until=6):
        try:
            with step:
                if step.number == 3 and first and not tries:
                    tries.append(1)
                    raise ZeroDivisionError
                training.update(step)
                if step.number == 3 and not tries:
                    tries.append(1)
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert not step.committed


def test_an_exception_before_the_update_may_be_caught(tmp_path: Path):
    training = Training(tmp_path / "a")
    caught(training, first=True)
    assert training.bits() == Training(tmp_path / "b").sail(6).bits()


def test_an_exception_after_the_update_may_not_be_caught(tmp_path: Path):
    training = Training(tmp_path / "a")
    with pytest.raises(ConfigError, match="step 3 raised ZeroDivisionError and the script caught it"):
        caught(training, first=False)


def test_a_check_after_the_update_is_too_late(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match=r"step\.check comes too late"):
        training.sail(6, lambda step: step.check(training.update(step)))


@pytest.mark.parametrize(
    "given", [{"save_every": 0}, {"save_every": "10"}, {"save_every_s": "x"}, {"keep": "all"}, {"spike": 3.0}], ids=str
)
def test_what_a_run_cannot_use_is_refused_at_once(tmp_path: Path, given: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(given))):
        Training(tmp_path, **given)


def test_the_numbers_of_steps_are_whole(tmp_path: Path):
    training = Training(tmp_path)
    for until in ("5", 5.5, -1):
        with pytest.raises(ConfigError, match="until must be a whole number"):
            training.sail(until)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="at least 1: 0"):
        training.sail(2, lambda step: step.every(0))


@pytest.mark.parametrize(
    ("said", "work"),
    [
        ("step.check takes a loss, a number or a tensor: 'x'", lambda step: step.check("x")),
        ("step.once takes a function that makes the value: 5", lambda step: step.once("a", 5)),
        ("step.once takes a name: 5", lambda step: step.once(5, lambda: 5)),
    ],
    ids=["check", "once", "name"],
)
def test_what_a_step_cannot_use_is_refused(tmp_path: Path, said: str, work: Callable[[Step], Any]):
    with pytest.raises(ConfigError, match=said):
        Training(tmp_path).sail(2, work)


def test_the_best_of_no_name_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"run\.best takes a name: 3"):
        Training(tmp_path).run.best(3)  # pyright: ignore[reportArgumentType]


def test_a_file_is_no_directory_of_a_run(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file cannot be used as a run directory: it is a file"):
        Training(tmp_path / "file")


def test_a_disk_that_is_full_from_the_beginning_is_named(small_disk: Path):
    training = Training(small_disk / "run")
    with suppress(OSError):
        (small_disk / "rest").write_bytes(bytes(1 << 20))
    with pytest.raises(ConfigError, match="run cannot be written to: No space left on device"):
        training.sail(2)
