"""A run of one process, without a launcher: what a script can say, and what it is told when it is wrong."""

import json
from pathlib import Path
from threading import Timer
from typing import Any, cast

import numpy as np
import pytest
import torch
from console import until
from torch import nn
from trainings import SAMPLES, Training

from argosy.checkpoint.commit_step import Committer
from argosy.core import ConfigError
from argosy.data import Loader
from argosy.train import Run, Step, read_log


def told(caught: "pytest.ExceptionInfo[ConfigError]") -> str:
    return f"{caught.value}\n{caught.value.hint}"


def test_a_second_run_goes_on_where_the_first_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole = Training(tmp_path / "whole").sail(9)
    Training(tmp_path / "parts").sail(5)
    parts = Training(tmp_path / "parts").sail(9)
    assert parts.bits() == whole.bits()
    assert [row.values for row in read_log(tmp_path / "parts")] == [row.values for row in read_log(tmp_path / "whole")]
    assert "resumed from step 5" in capsys.readouterr().err


def test_a_finished_run_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = Training(tmp_path).sail(4)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = Training(tmp_path).sail(4)
    assert again.bits() == first.bits()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "finished at step 4: nothing to do" in capsys.readouterr().err


def test_a_finished_run_goes_on_if_more_steps_are_asked_for(tmp_path: Path):
    Training(tmp_path).sail(4)
    assert Training(tmp_path).sail(6).run.step == 6


def test_a_replaced_rank_without_a_checkpoint_says_that_it_starts_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    training = Training(tmp_path)
    training.run.crew.generation = 1
    training.sail(2)
    assert capsys.readouterr().err.count("no checkpoint yet: starting over") == 1
    Training(tmp_path / "first").sail(2)
    assert "starting over" not in capsys.readouterr().err


def test_an_exception_leaves_the_last_step_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    training = Training(tmp_path)
    with pytest.raises(ZeroDivisionError):
        training.sail(9, training.breaking(6, first=True))
    again = Training(tmp_path).sail(9)
    assert again.bits() == Training(tmp_path / "whole").sail(9).bits()
    assert "resumed from step 6" in capsys.readouterr().err


def test_an_exception_after_the_update_costs_the_steps_since_the_checkpoint(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ZeroDivisionError):
        training.sail(9, training.breaking(6, first=False))
    assert Training(tmp_path).sail(9).bits() == Training(tmp_path / "whole").sail(9).bits()


def test_an_exception_after_the_first_update_leaves_it_out(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ZeroDivisionError):
        training.sail(9, training.breaking(0, first=False))
    assert training.run.step == 0
    assert training.bits() == Training(tmp_path / "new").bits()


def test_a_loss_that_is_not_finite_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    training, seen = Training(tmp_path), dict[int, dict[str, bytes]]()
    for step in training.run.steps(until=6):
        before = training.bits()
        with step:
            training.update(step, float("nan") if step.number in (0, 4) else 1.0)
        seen[step.number] = {} if training.bits() == before else training.bits()
    assert [number for number, bits in seen.items() if not bits] == [0, 4]
    said = capsys.readouterr().err
    assert "skipped step 0: a gradient or loss is not finite" in said
    assert "skipped step 4" in said
    assert training.data.step == 6


def test_check_leaves_a_step_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    training = Training(tmp_path)
    for step in training.run.steps(until=4):
        with step:
            step.check(float("inf") if step.number == 2 else 0.5)
            training.update(step)
    assert capsys.readouterr().err.count("skipped step") == 1


def test_log_best_and_age(tmp_path: Path):
    training = Training(tmp_path)
    for step in training.run.steps(until=6):
        with step:
            training.update(step)
            training.run.log(inside=step.number)
        training.run.log(value=abs(step.number - 2), rising=step.number)
        if training.run.best("value").age > 1:
            training.run.stop("no progress")
        assert training.run.best("rising", highest=True).age == 0
    best = training.run.best("value")
    assert (best.value, best.step, best.age) == (0.0, 3, 3)
    rows = read_log(tmp_path)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.values["inside"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert set(rows[0].values) == {"loss", "inside", "value", "rising"}


def test_the_best_is_known_whenever_it_is_asked_for(tmp_path: Path):
    training = Training(tmp_path)
    for step, value in zip(training.run.steps(until=6), (5, 1, 4, 3, 9, 2), strict=True):
        with step:
            training.update(step)
            training.run.log(value=value)
    assert (training.run.best("value").value, training.run.best("value").step) == (1.0, 2)
    assert training.run.best("value", highest=True).value == 9.0


def test_what_is_logged_is_the_value_at_the_call(tmp_path: Path):
    training, total, count = Training(tmp_path), torch.zeros(()), np.zeros(())
    for step in training.run.steps(until=3):
        with step:
            training.update(step)
            training.run.log(total=total, count=count)
            total += 1
            count += 1
        training.run.log(after=total)
        total += 1
    rows = [row.values for row in read_log(tmp_path)]
    assert [(row["total"], row["count"], row["after"]) for row in rows] == [(0, 0, 1), (2, 1, 3), (4, 2, 5)]


def test_the_best_that_was_asked_for_stays_as_it_was(tmp_path: Path):
    training = Training(tmp_path)
    for step in training.run.steps(until=3):
        with step:
            training.update(step)
            training.run.log(value=-step.number)
        if step.number == 0:
            first = training.run.best("value")
    assert (first.value, first.step, training.run.best("value").step) == (0.0, 1, 3)


def test_what_is_no_number_is_not_logged(tmp_path: Path):
    run = Training(tmp_path).run
    with pytest.raises(ConfigError, match=r"run\.log takes numbers: note='hello'"):
        run.log(note="hello")
    with pytest.raises(ConfigError, match=r"run\.log takes numbers: many=tensor"):
        run.log(many=torch.zeros(2))
    with pytest.raises(ConfigError, match=r"run\.log takes numbers: wave=tensor"):
        run.log(wave=torch.zeros((), dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"run\.log takes numbers: many=array"):
        run.log(many=np.zeros(2))


def test_an_optimizer_that_is_not_tracked_is_refused(tmp_path: Path):
    training = Training(tmp_path)
    other = torch.optim.SGD(training.model.parameters(), lr=0.1)

    def work(step: Step) -> None:
        training.model(step.batch(training.data)).sum().backward()
        other.step()

    with pytest.raises(ConfigError, match="an untracked optimizer steps in step 0"):
        training.sail(3, work)


def test_an_optimizer_outside_the_block_is_refused(tmp_path: Path):
    training = Training(tmp_path)

    def sail() -> None:
        for step in training.run.steps(until=3):
            with step:
                training.model(step.batch(training.data)).sum().backward()
            training.optimizer.step()

    with pytest.raises(ConfigError, match="an optimizer steps outside `with step:`, after step 1"):
        sail()


def test_best_is_remembered_by_the_next_launch(tmp_path: Path):
    for last in (3, 5):
        training = Training(tmp_path)
        for step in training.run.steps(until=last):
            with step:
                training.update(step)
                training.run.log(value=abs(step.number - 1))
            best = training.run.best("value")
    assert (best.value, best.step, best.age) == (0.0, 2, 3)


def test_stop_ends_after_a_step_that_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    training = Training(tmp_path)
    for step in training.run.steps(until=100):
        with step:
            training.update(step)
        if step.number == 4:
            training.run.stop("enough")
    assert training.run.step == 6
    assert "stopped after step 6: enough" in capsys.readouterr().err
    assert Training(tmp_path).sail(8).bits() == Training(tmp_path / "whole").sail(8).bits()


def test_state_is_rolled_back_and_resumed(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ZeroDivisionError):
        training.sail(9, training.breaking(3, first=True))
    assert training.run.state == {"seen": [0, 1, 2]}
    again = Training(tmp_path).sail(4)
    assert again.run.state == {"seen": [0, 1, 2]}


def test_once_is_the_same_however_an_attempt_changed_it(tmp_path: Path):
    training, seen = Training(tmp_path, recheck=1), list[list[int]]()
    for step in training.run.steps(until=2):
        with step:
            value: list[int] = step.once("x", lambda: [1])
            seen.append([*value])
            value.append(2)
            training.update(step)
    assert seen == [[1]] * 4, "each step is computed twice"


def test_what_once_cannot_keep_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"the value of step\.once cannot be pickled: 'x'"):
        Training(tmp_path).sail(1, lambda step: step.once("x", lambda: (number for number in range(3))))


def test_once_is_made_once_per_step(tmp_path: Path):
    training, made = Training(tmp_path), list[int]()
    for step in training.run.steps(until=3):
        with step:
            values = [step.once("x", lambda number=step.number: made.append(number) or number) for _ in range(3)]
            assert values == [step.number] * 3
            training.update(step)
    assert made == [0, 1, 2]


def test_every_counts_steps(tmp_path: Path):
    training, seen = Training(tmp_path), list[int]()
    for step in training.run.steps(until=7):
        with step:
            training.update(step)
        if step.every(3):
            seen.append(step.number)
    assert seen == [2, 5]


def test_aside_restores_the_mode_of_every_module(tmp_path: Path):
    training = Training(tmp_path)
    training.model[0].eval()
    for step in training.run.steps(until=1):
        with step:
            training.update(step)
        with training.run.aside("evaluation"):
            training.model.eval()
    assert [module.training for module in training.model] == [False, True, True]


def test_an_exception_aside_is_the_users(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for step in training.run.steps(until=1):
            with step:
                training.update(step)
            with training.run.aside("evaluation"):
                raise ZeroDivisionError


def test_a_tagged_checkpoint_is_kept(tmp_path: Path):
    training = Training(tmp_path, save_every=1)
    for step in training.run.steps(until=8):
        with step:
            training.update(step)
        if step.number == 1:
            training.run.save("good")
    from argosy.checkpoint import list_steps

    assert 2 in [info.step for info in list_steps(tmp_path)]


# -- mistakes --------------------------------------------------------------------------------------


def test_save_inside_a_step_and_outside_the_loop(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match="outside the loop"):
        training.run.save()
    with pytest.raises(ConfigError, match="step 0 is still open"):
        training.sail(1, lambda _: training.run.save())


def test_track_twice(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match="again is tracked already, as model"):
        training.run.track(again=training.model)
    with pytest.raises(ConfigError, match="model is tracked already"):
        training.run.track(model=nn.Linear(1, 1))


def test_an_optimizer_of_a_module_that_is_not_tracked(tmp_path: Path):
    run, model = Run(tmp_path), nn.Linear(2, 2)
    run.track(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="2 parameters of optimizer belong to no tracked module") as caught:
        next(iter(run.steps(until=1)))
    assert "track the module as well" in told(caught)


def test_a_step_inside_a_step(tmp_path: Path):
    training = Training(tmp_path)
    steps = iter(training.run.steps(until=9))
    step = next(steps)
    with pytest.raises(ConfigError, match="step 0 is still open"), step, Step(training.run, 1):
        pass
    with pytest.raises(ConfigError, match="step 0 was entered before"), step:
        pass


def test_a_step_that_is_not_entered(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match="step 0 was never entered") as caught:
        for _ in training.run.steps(until=3):
            pass
    assert "write `with step:`" in told(caught)


def test_an_optimizer_that_steps_in_backward(tmp_path: Path):
    training = Training(tmp_path)
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: training.optimizer.step())
    before = training.bits()
    with pytest.raises(ConfigError, match="inside backward"):
        training.sail(3, lambda step: training.model(step.batch(training.data)).sum().backward())
    assert training.bits() == before


def test_a_model_that_changed_since_the_checkpoint(tmp_path: Path):
    Training(tmp_path, width=3).sail(2)
    with pytest.raises(ConfigError, match=r"does not fit the tracked state: .*\[3\], here it is \[5\]"):
        Training(tmp_path, width=5).sail(4)


def test_something_tracked_that_the_checkpoint_does_not_have(tmp_path: Path):
    Training(tmp_path).sail(2)
    training = Training(tmp_path)
    training.run.track(extra=nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="does not fit the tracked state") as caught:
        training.sail(4)
    assert "another directory" in told(caught)


def test_data_without_samples(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match="empty"):
        training.data = Loader(SAMPLES[:0], batch=4)


def test_data_that_are_used_up_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for _ in range(2):
        training = Training(tmp_path)
        training.data = Loader(SAMPLES[:6], batch=4, epochs=2)
        training.sail(9)
    said = capsys.readouterr().err
    assert "finished after step 3" in said
    assert "finished at step 3: nothing to do" in said


def test_data_from_something_else_than_a_loader(tmp_path: Path):
    training = Training(tmp_path)
    with pytest.raises(ConfigError, match=r"takes data from an argosy\.data\.Loader or Queue: list"):
        training.sail(1, lambda step: step.batch(cast(Any, [1, 2, 3])))


def test_several_microbatches_taken_as_one(tmp_path: Path):
    training = Training(tmp_path)
    training.data = Loader(SAMPLES, batch=4, micro=2)
    with pytest.raises(ConfigError, match="2 microbatches") as caught:
        training.sail(1)
    assert "step.batches(data)" in told(caught)


def test_what_bits_depend_on_is_named_when_it_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Training(tmp_path).sail(2)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        Training(tmp_path).sail(3)
    finally:
        torch.set_num_threads(threads)
    assert f"threads was {threads}, is {threads + 1}" in capsys.readouterr().err


NO_SPACE = "[Errno 28] No space left on device; retrying"


def test_a_full_disk_costs_checkpoints_and_nothing_else(small_disk: Path, capsys: pytest.CaptureFixture[str]):
    training = Training(small_disk / "run")
    for step in training.run.steps(until=12):
        with step:
            training.update(step)
        if step.number == 5:
            fill(small_disk / "ballast")
        if step.number == 9:
            until(lambda: NO_SPACE in capsys.readouterr().err, NO_SPACE)
            (small_disk / "ballast").unlink()
    assert [row.step for row in read_log(small_disk / "run")] == list(range(1, 13))
    assert training.bits() == Training(small_disk.parent / "whole").sail(12).bits()
    assert Training(small_disk / "run").sail(12).bits() == training.bits()


def test_the_end_waits_for_room_on_the_disk(
    small_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Committer, "retry_after_s", (0.1,))
    training = Training(small_disk / "run")

    def work(step: Step) -> None:
        training.update(step)
        if step.number == 5:
            fill(small_disk / "ballast")
            Timer(1.0, (small_disk / "ballast").unlink).start()

    training.sail(6, work)
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "the last checkpoint (step 6) is retried" in said
    assert said.endswith("finished after step 6\n")
    assert Training(small_disk / "run").sail(6).bits() == training.bits()


def fill(path: Path) -> None:
    size = 1 << 16
    with path.open("wb", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def test_the_finished_mark_can_be_read(tmp_path: Path):
    Training(tmp_path).sail(2)
    assert json.loads((tmp_path / "finished.json").read_text()) == {"step": 2, "until": 2}
