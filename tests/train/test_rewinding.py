"""A run that goes back to an older step: by its script, or by itself when the loss leaps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from console import Console, terminal
from trainings import Training

from argosy.checkpoint import KeepLast, StepInfo, list_steps
from argosy.core import ConfigError
from argosy.train import LossSpike, Spike, Step, read_log
from argosy.train.rewinding import targets
from argosy.train.spikes import NOTHING, Watch, from_word, to_word

SCRIPT = str(Path(__file__).parent / "scripts" / "rewinding.py")


class Leaping(Training):
    """Takes notes of its samples; asks to go back once, or has losses that leap."""

    def __init__(self, directory: Path, **how: object) -> None:
        super().__init__(directory, **how)
        self.seen: list[tuple[int, tuple[int, ...]]] = []
        self.leaps: set[tuple[int, ...]] = set()

    def update(self, step: Step, factor: float = 1.0) -> torch.Tensor:
        loss = self.model(step.batch(self.data)).square().mean() * factor
        assert self.data.handed is not None
        ids = tuple(int(each) for each in self.data.handed.ids)
        self.seen.append((step.number, ids))
        step.check(1000.0 if ids in self.leaps else 1.0)
        loss.backward()
        self.optimizer.step()
        self.run.log(loss=loss)
        return loss

    def back_once(self, at: int, to: int, skip: int | None) -> "Leaping":
        asked = False

        def work(step: Step) -> None:
            nonlocal asked
            if step.number == at and not asked:
                asked = True
                self.run.rewind(to, skip=skip, reason="a test")
            self.update(step)

        self.sail(12, work)
        return self


def test_going_back_and_using_the_same_data_gives_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    calm = Leaping(tmp_path / "calm").sail(12)
    back = Leaping(tmp_path / "back").back_once(9, 6, 0)
    assert back.bits() == calm.bits()
    assert [number for number, _ in back.seen] == [*range(10), *range(4, 12)]
    rows = [[(row.step, row.values) for row in read_log(tmp_path / name)] for name in ("calm", "back")]
    assert rows[0] == rows[1]
    assert "rolled back from step 10 to step 4 (a test); 0 batches are skipped" in capsys.readouterr().err


def test_the_data_since_then_are_left_out(tmp_path: Path):
    back = Leaping(tmp_path).back_once(9, 6, None)
    ids = [ids for _, ids in back.seen]
    assert len(set(ids[:10])) == 10
    # Ten batches an epoch: the next one begins where the eleventh batch would have.
    later = Leaping(tmp_path / "calm")
    later.sail(18)
    assert ids[10:] == [ids for _, ids in later.seen][10:18]


def test_a_resume_never_goes_on_from_what_was_left_behind(tmp_path: Path):
    calm = Leaping(tmp_path / "calm").back_once(9, 4, None)
    first = Leaping(tmp_path / "run")

    def work(step: Step) -> None:
        if step.number == 5 and first.run.ledger.eras:
            raise ZeroDivisionError
        if step.number == 9:
            first.run.rewind(4)
        first.update(step)

    with pytest.raises(ZeroDivisionError):
        first.sail(12, work)
    # Step 8 of the old future is still on disk, and step 5 is newer.
    assert [(each.era, each.step) for each in list_steps(tmp_path / "run")][:3] == [(1, 5), (1, 4), (0, 8)]
    again = Leaping(tmp_path / "run").sail(12)
    assert again.seen[0][0] == 5
    assert again.bits() == calm.bits()
    assert [each.step for each in list_steps(tmp_path / "run")] == [12, 8, 5]


def test_a_tagged_step_of_the_old_future_stays(tmp_path: Path):
    training = Leaping(tmp_path, keep=[KeepLast(3)])
    asked = False
    for step in training.run.steps(until=12):
        with step:
            if step.number == 9 and not asked:
                asked = True
                training.run.rewind(4)
            training.update(step)
        if step.number == 6:
            training.run.save(tag=f"era{len(training.run.ledger.eras)}")
    found = {(each.era, each.step): each.tags for each in list_steps(tmp_path)}
    assert found == {(0, 7): ["era0"], (1, 7): ["era1"], (1, 8): [], (1, 12): []}


def test_without_a_checkpoint_so_old_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    training = Leaping(tmp_path).back_once(5, 2, None)
    assert training.bits() == Leaping(tmp_path / "calm").sail(12).bits()
    assert "no checkpoint at or before step 2 to roll back to; continuing at step 6" in capsys.readouterr().err


def test_a_run_goes_back_only_into_its_own_past():
    steps = [StepInfo(step=step, era=era, directory="") for era, step in [(0, 4), (0, 8), (0, 12), (1, 8), (2, 10)]]
    steps.append(StepInfo(step=9, directory="", fault="torn"))
    assert targets(steps, [], 10) == [10, 8, 8, 4]
    assert targets(steps, [8], 12) == [10, 8, 8, 4]
    assert targets(steps[:3], [4], 20) == [4]
    assert targets(steps, [8], 3) == []


def test_a_nonsensical_wish_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="to must be a whole number of at least 0: -1"):
        Training(tmp_path).run.rewind(-1)
    with pytest.raises(ConfigError, match="over=0"):
        Spike(over=0.5)


def test_a_run_that_only_goes_back_ends(tmp_path: Path):
    training = Leaping(tmp_path)

    def work(step: Step) -> None:
        training.update(step)
        if step.number == 5:
            training.run.rewind(4)

    with pytest.raises(ConfigError, match="rolled back to step 4 20 times in a row"):
        training.sail(12, work)
    assert training.run.ledger.eras == [4] * 20


def test_a_leap_of_the_loss_leaves_the_step_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    calm = Leaping(tmp_path / "calm").sail(7)
    leaping = Leaping(tmp_path / "leaping", spike=Spike(window=4))
    leaping.leaps = {calm.seen[6][1]}
    leaping.sail(7)
    assert leaping.bits() == Leaping(tmp_path / "six").sail(6).bits()
    assert "skipped step 6: the loss is 1000, its running mean was 1" in capsys.readouterr().err


def test_after_a_leap_the_run_goes_back(tmp_path: Path):
    calm = Leaping(tmp_path / "calm").sail(12)
    leaping = Leaping(tmp_path / "leaping", spike=Spike(window=4, then="rewind", back=3))
    leaping.leaps = {calm.seen[9][1]}
    leaping.sail(12)
    assert [number for number, _ in leaping.seen] == [*range(10), *range(4, 12)]
    assert leaping.seen[9][1] not in [ids for _, ids in leaping.seen[10:16]]


def test_a_loss_that_stays_high_ends_the_run(tmp_path: Path):
    calm = Leaping(tmp_path / "calm").sail(10)
    leaping = Leaping(tmp_path / "leaping", spike=Spike(window=2, most=3))
    leaping.leaps = {ids for _, ids in calm.seen[5:]}
    with pytest.raises(LossSpike, match="step 7: the loss is 1000, its running mean was 1; spike 3 in a row"):
        leaping.sail(10)


def test_the_mean_moves_with_the_loss_and_not_with_spikes():
    policy = Spike(over=2.0, window=4)
    watch = Watch()
    for loss in (8.0, 4.0, NOTHING, 4.0, 4.0):
        assert not watch.is_spike(policy, 100.0)
        watch = watch.after(policy, loss)
    assert watch == Watch(5.0, 4)
    assert watch.after(policy, 100.0) == Watch(5.0, 4, 1)
    assert watch.after(policy, 100.0).after(policy, 9.0) == Watch(6.0, 5)


@pytest.mark.parametrize("losses", [[0.0, 1.5, 1e300], [-2.0, -1.0, 3.0], [NOTHING, -1e-9, 0.0]])
def test_words_turn_the_order_of_losses_round(losses: list[float]):
    words = [to_word(loss) for loss in losses]
    assert words == sorted(words, reverse=True)
    assert [from_word(word) for word in words] == losses


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """One terminal for all deaths: the zygote stays warm."""
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


@pytest.fixture(scope="module")
def calm(dock: Console) -> str:
    return digest(dock, "")


def digest(dock: Console, death: str) -> str:
    ended = dock.argosy("run", "-n", "2", SCRIPT, f"{dock.cwd}/{death or 'calm'}", death)
    assert ended.code == 0, ended.text
    return next(line for line in ended.out.decode().splitlines() if "digest" in line)


@pytest.mark.parametrize("death", ["1:9", "0:6", "1:rewind"])
def test_ranks_go_back_together_whoever_dies(dock: Console, calm: str, death: str):
    assert digest(dock, death) == calm
