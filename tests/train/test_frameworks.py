"""Trainers of other people: ranks are killed in every phase of a step, and nothing differs from an undisturbed run."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from console import REPOSITORY, Console, Ended, terminal

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

EXAMPLES = REPOSITORY / "examples"
KILLING = Path(__file__).with_name("scripts") / "killing.py"
FRAMEWORKS = ["trainer", "accelerate", "lightning", "trl", "grpo"]
DEATHS = {
    "before and at the vote": ["1.0:enter:3", "0.0:vote:7", "1.1:voted:10"],
    "after the update": ["1.0:commit:3", "0.0:commit:7", "0.1:commit:10"],
}


USUAL = [["0.0:commit:3", "0.1:commit:7", "0.2:commit:11"], ["1.0:vote:3", "0.0:enter:5", "1.1:commit:9"]]
TOGETHER = ["1.0:enter:3", "0.1:vote:7", "1.2:voted:10"]
"""Each of these deaths ends all ranks."""
EXCHANGING = """
class Exchanging(__import__("transformers").TrainerCallback):
    def on_optimizer_step(self, *_, **__):
        torch.distributed.all_reduce(torch.ones(1))
trainer.add_callback(Exchanging())
"""
DYING_AT_THE_END = """
if rank == "0" and generation == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
CHANGED = {
    "trainer": ("outcome = trainer", EXCHANGING + "outcome = trainer"),
    "accelerate": ("schedule.step()", "torch.distributed.all_reduce(torch.ones(1)); schedule.step()"),
}
"""Between the update and the end of the step ranks exchange data: the step cannot be repeated."""


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        console.env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(console.cwd / "hf")}
        yield console


_calm: dict[str, list[str]] = {}


def sail(console: Console, framework: str, name: str, *deaths: str) -> list[str]:
    """The last loss and the weights of each rank."""
    text = (EXAMPLES / f"survive_{framework}.py").read_text()
    return results(run(console, framework, name, text, *deaths), [1 + count(rank, deaths) for rank in range(2)])


def count(rank: int, deaths: Sequence[str]) -> int:
    return sum(death.startswith(f"{rank}.") for death in deaths)


def run(console: Console, framework: str, name: str, text: str, *deaths: str) -> tuple[Ended, list[int]]:
    """How it ended, and how many processes each rank had."""
    script = console.cwd / f"{framework}_dying.py"
    script.write_text(KILLING.read_text() + text)
    directory = console.cwd / f"{framework}-{name}"
    ended = console.argosy("run", "-n", "2", str(script), str(directory), *deaths, patience_s=600)
    assert ended.code == 0, ended.text
    return ended, [len(path.read_text().split()) for path in sorted(Path(f"{directory}.pids").iterdir())]


def results(done: tuple[Ended, list[int]], processes: list[int]) -> list[str]:
    ended, pids = done
    assert pids == processes, ended.text
    found = re.findall(r"rank (\d)  loss (\S+)  weights (\w+)", ended.text)
    assert len(found) == 2, ended.text
    assert found[0][2] == found[1][2]
    return [" ".join(words) for words in sorted(found)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", DEATHS)
def test_three_kills_change_nothing(dock: Console, framework: str, name: str):
    if framework not in _calm:
        _calm[framework] = sail(dock, framework, "calm")
    assert sail(dock, framework, name.replace(" ", "-"), *DEATHS[name]) == _calm[framework]


@pytest.mark.parametrize("framework", ["trainer", "accelerate", "lightning"])
def test_evaluations_callbacks_and_saves_of_usual_scripts_survive(dock: Console, framework: str):
    """Ranks die at evaluations and at the very end, where a replaced rank could save or log what it has not got yet."""
    text = KILLING.with_name(f"usual_{framework}.py").read_text()
    calm = results(run(dock, framework, "usual-calm", text), [1, 1])
    for number, deaths in enumerate(USUAL):
        done = run(dock, framework, f"usual-{number}", text, *deaths)
        assert results(done, [1 + count(rank, deaths) for rank in range(2)]) == calm


def test_a_rank_that_dies_when_the_training_is_over_has_the_weights_again(dock: Console):
    """It may be the one that saves the final model."""
    text, after = (EXAMPLES / "survive_trainer.py").read_text(), "outcome = trainer.train()\n"
    assert after in text
    dying = text.replace(after, after + DYING_AT_THE_END)
    if "trainer" not in _calm:
        _calm["trainer"] = sail(dock, "trainer", "calm-at-the-end")
    assert results(run(dock, "trainer", "at-the-end", dying), [2, 1]) == _calm["trainer"]


@pytest.mark.parametrize("kind", ["trainer", "accelerate", "lightning_manual", "lightning_sharded"])
def test_where_no_step_can_be_repeated_all_ranks_restart_from_memory(dock: Console, kind: str):
    if kind in CHANGED:
        whole = (EXAMPLES / f"survive_{kind}.py").read_text()
        assert CHANGED[kind][0] in whole
        text = whole.replace(*CHANGED[kind])
    else:
        text = KILLING.with_name(f"{kind}.py").read_text()
    calm, dying = (run(dock, kind, f"together{len(deaths)}", text, *deaths) for deaths in ([], TOGETHER))
    assert "if a rank is lost, all ranks restart" in calm[0].text
    for step in (3, 7, 10):
        assert f"all ranks have restarted at step {step}, from memory" in dying[0].text
    assert results(dying, [4, 4]) == results(calm, [1, 1])
