"""What happens to a training: signals, exceptions, ranks that disagree; alone, under torchrun, under `argosy run`."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, Ended, said, terminal, until
from daemons import press_until_it_ends
from warm import warm

from argosy.checkpoint import list_steps
from argosy.train import read_log

SCRIPT = str(Path(__file__).parent / "scripts" / "trip.py")
STEPS = 12


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """One terminal for all trips: the zygote stays warm."""
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


@pytest.fixture
def place(dock: Console, request: pytest.FixtureRequest) -> Path:
    """The directory of a run."""
    path = dock.cwd / request.node.name
    path.mkdir()
    return path


def launch(dock: Console, place: Path, mishap: str = "", *, ranks: int = 2, steps: int = STEPS) -> Ended:
    return dock.argosy("run", "-n", str(ranks), SCRIPT, str(place), str(steps), mishap)


def begin(dock: Console, place: Path, mishap: str, *words: str) -> tuple["subprocess.Popen[bytes]", Path]:
    """Start a trip in the background; returns it and where it writes."""
    out = place / "said"
    return dock.start("run", "-n", "2", *words, SCRIPT, str(place), str(STEPS), mishap, out=out), out


def digests(text: str) -> list[str]:
    return next(line.split("digests")[1] for line in text.splitlines() if "digests" in line).split()


def notes(place: Path, rank: int) -> list[str]:
    return (place / f"notes.{rank}").read_text().splitlines()


def built(place: Path, rank: int) -> int:
    return len((place / f"built.{rank}").read_text().split())


def wait_for_step(place: Path) -> None:
    """Until both the sixth step and the checkpoint after the fourth are there."""
    until(lambda: (place / "notes.0").exists() and "done 5" in notes(place, 0), "step 5")
    until(lambda: list_steps(place), "a checkpoint")


@pytest.fixture(scope="module")
def calm(dock: Console) -> list[str]:
    """The digests of a trip of two ranks to which nothing happened."""
    path = dock.cwd / "calm"
    path.mkdir()
    ended = launch(dock, path)
    assert ended.code == 0, ended.text
    return digests(ended.text)


def went_on(dock: Console, place: Path, calm: list[str], *, after: int) -> Ended:
    """The next launch of a run goes on from a step not before `after`, and ends in the same bits."""
    ended = launch(dock, place)
    assert ended.code == 0, ended.text
    assert digests(ended.text) == calm
    at = int(ended.text.split("resumed from step ")[1].split(" ")[0])
    assert after <= at < STEPS
    assert [row.step for row in read_log(place)] == list(range(1, STEPS + 1))
    return ended


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "interrupted")]
)
def test_preemption_and_ctrl_c_save_and_the_next_launch_goes_on(
    dock: Console, place: Path, calm: list[str], number: int, code: int, word: str
):
    command, out = begin(dock, place, "wait")
    wait_for_step(place)
    command.send_signal(number)
    assert command.wait(PATIENCE_S) == code, out.read_text()
    said(out, f"{word}: saved step")
    assert "the same command resumes from there" in out.read_text()
    assert "Traceback" not in out.read_text()
    went_on(dock, place, calm, after=6)


@pytest.mark.system
def test_argosy_stop_saves_and_the_next_launch_goes_on(dock: Console, place: Path, calm: list[str]):
    ended = dock.argosy("run", "-d", "-n", "2", "--name", "stopped", SCRIPT, str(place), str(STEPS), "wait")
    assert ended.code == 0, ended.text
    wait_for_step(place)
    ended = dock.argosy("stop", "stopped")
    assert ended.code == 0, ended.text
    went_on(dock, place, calm, after=6)


def test_ctrl_c_alone_saves_and_says_so_in_one_line(dock: Console, place: Path):
    with (place / "said").open("wb") as out:
        started = subprocess.Popen(words_of(place, "wait"), cwd=dock.cwd, env=dock.env, stdout=out, stderr=out)
    wait_for_step(place)
    started.send_signal(signal.SIGINT)
    assert started.wait(PATIENCE_S) == 130
    text = (place / "said").read_text()
    assert text == "argosy: interrupted: saved step 7; the same command resumes from there\n"


def test_argosy_ps_tells_the_step_of_the_run_not_of_the_process(dock: Console, place: Path):
    before = set(dock.runtime.glob("keeper-*.lock"))
    assert launch(dock, place, steps=5).code == 0
    ended = dock.argosy("run", "-d", "-n", "2", "--name", "counted", SCRIPT, str(place), str(STEPS), "wait")
    assert ended.code == 0, ended.text
    until(lambda: {rank["steps"] for rank in dock.ps("counted").get("ranks", [])} == {6}, "both at step 6")
    (place / "go").touch()
    until(lambda: (place / "finished.json").exists() and dock.ps("counted").get("state") == "ended", "its end")
    until(lambda: set(dock.runtime.glob("keeper-*.lock")) <= before, "no lock of a keeper that ended")


@pytest.mark.system
def test_a_second_ctrl_c_ends_at_once(dock: Console, place: Path, calm: list[str]):
    command, out = begin(dock, place, "stuck")
    until(lambda: all((place / f"notes.{r}").exists() and "stuck" in notes(place, r) for r in (0, 1)), "stuck ranks")
    command.send_signal(signal.SIGINT)
    said(out, "stopping: ctrl-c")
    press_until_it_ends(command)
    assert command.returncode in (130, -signal.SIGINT), out.read_text()  # A shell shows 130 for both.
    went_on(dock, place, calm, after=4)


def test_stop_by_one_rank_ends_all_after_the_same_step(dock: Console, place: Path):
    ended = launch(dock, place, "stop")
    assert ended.code == 0, ended.text
    assert "stopped" in ended.text
    assert notes(place, 0)[-1] == notes(place, 1)[-1] == "done 5"


def test_a_finished_run_started_again_says_so(dock: Console, place: Path):
    first, second = launch(dock, place, steps=4), launch(dock, place, steps=4)
    assert second.code == 0, second.text
    assert "finished at step 4: nothing to do" in second.text
    assert digests(second.text) == digests(first.text)
    assert notes(place, 1) == [f"done {number}" for number in range(4)]


# -- errors ----------------------------------------------------------------------------------------


def test_a_step_that_always_fails_is_tried_three_times(dock: Console, place: Path):
    ended = launch(dock, place, "raise")
    assert ended.code == 1, ended.text
    assert "ValueError: broken" in ended.text
    assert "step 3 failed 3 times: giving up" in ended.text
    assert built(place, 0) == 1
    assert built(place, 1) == 3


def test_an_exception_that_all_ranks_catch_ends_the_run(dock: Console, place: Path):
    ended = launch(dock, place, "caught")
    assert ended.code == 1, ended.text
    assert "step 3 raised ValueError and the script caught it" in ended.text


@pytest.mark.parametrize(
    ("mishap", "code", "word"),
    [
        ("exit", 7, "step 3 failed 3 times: giving up"),
        ("crash", 128 + signal.SIGSEGV, "rank 1 failed by itself 3 times in a row, without progress"),
        ("exit after each", 7, "rank 1 failed by itself 3 times in a row, without progress"),
        ("start", 1, "rank 1 failed by itself 3 times in a row, without progress"),
    ],
)
def test_what_always_ends_at_the_same_place_is_tried_three_times(
    dock: Console, place: Path, mishap: str, code: int, word: str
):
    ended = launch(dock, place, mishap)
    if mishap == "start" and built(place, 1) == 1:  # Before rank 0 had made its run: there is none to go on with.
        assert ended.code == 1, ended.text
        return
    assert ended.code == code, ended.text
    assert word in ended.text
    assert (built(place, 0), built(place, 1)) == (1, 3)


@pytest.mark.parametrize(
    ("mishap", "who", "site"),
    [
        ("break", "rank 0 left the loop after step 5", "break"),
        ("break and stay", "rank 0 left the loop after step 5", "break"),
        ("leave", "rank 1 left the loop after step 3", "sys.exit(0)"),
        ("vanish", "rank 1 ended with exit code 0, in or before step 3", ""),
    ],
)
def test_a_rank_that_leaves_the_loop_is_not_waited_for(dock: Console, place: Path, mishap: str, who: str, site: str):
    ended = launch(dock, place, mishap)
    assert ended.code == 1, ended.text
    assert "while the other ranks continued" in ended.text
    line = next(line for line in ended.text.splitlines() if f"Diverged: {who}" in line)
    if site:
        number = int(line.split("trip.py:")[1].split(")")[0])
        assert Path(SCRIPT).read_text().splitlines()[number - 1].strip() == site
    assert "call run.stop()" in ended.text
    assert (built(place, 0), built(place, 1)) == (1, 1)


def test_all_ranks_may_leave_after_the_same_step_and_begin_another_loop(dock: Console, place: Path):
    ended = launch(dock, place, "break all")
    assert ended.code == 0, ended.text
    assert "finished after step 7" in ended.text
    assert len(set(digests(ended.text))) == 1


@pytest.mark.parametrize("mishap", ["save", "save last"])
def test_a_checkpoint_of_one_rank_alone_is_refused(dock: Console, place: Path, mishap: str):
    ended = launch(dock, place, mishap)
    assert ended.code == 1, ended.text
    assert "not all ranks called run.save: rank 1 did not, at " in ended.text
    assert "call run.save on all of them" in ended.text
    assert (built(place, 0), built(place, 1)) == (1, 1)


def test_an_exception_after_the_vote_costs_no_step(dock: Console, place: Path, calm: list[str]):
    """The checkpoint that the others had begun is never whole; nobody waits for it."""
    ended = launch(dock, place, "late raise")
    assert ended.code == 0, ended.text
    assert digests(ended.text) == calm
    assert (built(place, 0), built(place, 1)) == (1, 2)


def test_ranks_that_disagree_are_named(dock: Console, place: Path):
    ended = launch(dock, place, "disagree")
    assert ended.code == 1, ended.text
    assert "ranks disagree: rank 0 does not update in step 4; rank 1 updates in step 4" in ended.text
    assert "if rank == 0" in ended.text
    assert (built(place, 0), built(place, 1)) == (1, 1)


def test_a_rank_that_skips_a_step_is_named(dock: Console, place: Path):
    ended = launch(dock, place, "skip")
    assert ended.code == 1, ended.text
    assert "ranks disagree in step 4: ranks called different collectives: rank 0: vote" in ended.text
    assert "if rank == 0" in ended.text
    assert "not restarted" in ended.text


def test_a_model_that_changed_is_refused_by_all(dock: Console, place: Path):
    assert launch(dock, place, steps=4).code == 0
    ended = launch(dock, place, "wider")
    assert ended.code == 1, ended.text
    assert "does not fit the tracked state" in ended.text
    assert (built(place, 0), built(place, 1)) == (2, 2)


def test_a_collective_after_the_vote_turns_copies_on(dock: Console, place: Path, calm: list[str]):
    ended = launch(dock, place, "late")
    assert ended.code == 0, ended.text
    assert digests(ended.text) == calm
    assert ended.text.count("step 0 communicates or makes gradients after its first update") == 1


def test_a_number_that_is_not_finite_on_one_rank_is_left_out_on_all(dock: Console, place: Path, calm: list[str]):
    ended = launch(dock, place, "nan")
    assert ended.code == 0, ended.text
    assert "skipped step 4: a gradient or loss is not finite" in ended.text
    found = digests(ended.text)
    assert found[0] == found[1] != calm[0]


# -- losses ----------------------------------------------------------------------------------------


def test_once_is_the_same_on_every_attempt(dock: Console, place: Path, calm: list[str]):
    ended = launch(dock, place, "once")
    assert ended.code == 0, ended.text
    assert digests(ended.text) == calm
    for rank in (0, 1):
        values = {line for line in notes(place, rank) if line.startswith("5 ")}
        assert len(values) == 1, values


def test_an_evaluation_whose_peer_dies_is_given_up(dock: Console, place: Path, calm: list[str]):
    ended = launch(dock, place, "aside")
    assert ended.code == 0, ended.text
    assert "abandoned evaluation after step 4: rank 1 lost (SIGKILL)" in ended.text
    assert digests(ended.text) == calm
    assert {line for line in notes(place, 0) if "training" in line} == {"training True"}
    assert built(place, 0) == 1


def test_a_killed_keeper_costs_nothing(dock: Console, place: Path, calm: list[str]):
    command, out = begin(dock, place, "wait")
    wait_for_step(place)
    keepers = [line.split()[0] for line in dock.leftovers() if "argosy: keeper of" in line]
    assert keepers
    for pid in keepers:
        os.kill(int(pid), signal.SIGKILL)
    (place / "go").touch()
    assert command.wait(PATIENCE_S) == 0, out.read_text()
    assert digests(out.read_text()) == calm
    again = launch(dock, place, steps=STEPS + 1)
    assert "resumed from step 12" in again.text


# -- other ways to start ---------------------------------------------------------------------------


def words_of(place: Path, mishap: str = "") -> list[str]:
    """As `python trip.py` would be, from a process that has torch already."""
    return [*warm(), SCRIPT, str(place), str(STEPS), mishap]


def kill_at_step(dock: Console, words: list[str], place: Path) -> None:
    """Start something that knows no Argosy, and kill it with its ranks in the middle of a step."""
    with (place / "said").open("wb") as out:
        started = subprocess.Popen(words, cwd=dock.cwd, env=dock.env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    wait_for_step(place)
    ranks = [int(pid) for path in place.glob("built.*") for pid in path.read_text().split()]
    for pid in {started.pid, *ranks}:  # torchrun gives each rank a session of its own.
        os.kill(pid, signal.SIGKILL)
    started.wait(PATIENCE_S)


@pytest.mark.system
def test_alone_it_goes_on_after_a_kill_and_then_on_four_ranks(dock: Console, place: Path):
    whole = place / "whole"
    whole.mkdir()
    expected = launch(dock, whole, ranks=1)
    assert expected.code == 0, expected.text
    kill_at_step(dock, words_of(place, "wait"), place)
    ended = dock.run(words_of(place))
    assert ended.code == 0, ended.text
    assert "resumed from step 4" in ended.text
    assert digests(ended.text) == digests(expected.text)
    more = launch(dock, place, ranks=4, steps=STEPS + 4)
    assert more.code == 0, more.text
    assert "resumed from step 12" in more.text
    assert "ranks was 1, is 4" in more.text
    assert len(set(digests(more.text))) == 1
    assert [row.step for row in read_log(place)] == list(range(1, STEPS + 5))


@pytest.mark.system
def test_under_torchrun_the_next_launch_goes_on(dock: Console, place: Path, calm: list[str]):
    torchrun = [*warm(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    kill_at_step(dock, [*torchrun, *words_of(place, "wait")], place)
    ended = dock.run([*torchrun, *words_of(place)])
    assert ended.code == 0, ended.text
    assert "not under `argosy run`: a lost rank is not replaced" in ended.text
    assert "resumed from step 4" in ended.text
    assert digests(ended.text) == calm
