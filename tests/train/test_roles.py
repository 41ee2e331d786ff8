"""A training whose items come from actors ends with the same bits whichever role is killed, each item once."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, Ended, terminal, until

from argosy.train import read_log

SCRIPT = str(Path(__file__).parent / "scripts" / "roles.py")
STEPS, GROUPS = 9, 6


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


@pytest.fixture(scope="module")
def calm(dock: Console) -> list[str]:
    """The digests of a training that nobody disturbs."""
    return landed(dock.cwd / "calm", sail(dock, dock.cwd / "calm"), set())


def sail(console: Console, directory: Path, *deaths: str) -> Ended:
    return console.run([sys.executable, SCRIPT, str(directory), str(STEPS), *deaths])


def landed(directory: Path, ended: Ended, unsaid: set[int]) -> list[str]:
    """The digests, once rows and items are seen to be complete; `unsaid`: steps whose trainer died before it wrote."""
    assert ended.code == 0, ended.text
    assert [row.step for row in read_log(directory)] == list(range(1, STEPS + 1))
    for rank in range(2):
        found: dict[int, str] = {}
        for line in (directory / f"items.{rank}").read_text().splitlines():
            number, items = line.split(maxsplit=1)
            # After a resume steps are done again, with the same items.
            assert found.setdefault(int(number), items) == items
        assert set(found.values()) == {" ".join(str(3 * rank + place) for place in range(3))}
        assert set(found) | unsaid == set(range(STEPS))
    return next(line.split()[1:] for line in ended.text.splitlines() if line.startswith("digests"))


@pytest.mark.parametrize(
    "deaths",
    [
        ["generator 1.0:before put:0", "generator 0.0:after put:3", "generator 1.1:before put:5"],
        ["trainer 1.0:forward:2", "trainer 0.0:after vote:5", "judge 0.0:score:7"],
        ["trainer 0.0:constructor:0", "trainer 1.0:before vote:4", "generator 0.0:before put:4", "judge 0.0:score:4"],
    ],
    ids=["generators", "trainers and the judge", "all at once"],
)
def test_whichever_role_is_killed_the_bits_are_the_same(dock: Console, calm: list[str], deaths: list[str]):
    directory = dock.cwd / f"hard{len(list(dock.cwd.iterdir()))}"
    ended = sail(dock, directory, *deaths)
    assert landed(directory, ended, {5}) == calm
    for rank in range(2):
        lives = 1 + sum(death.startswith(f"trainer {rank}.") for death in deaths)
        assert len((directory / f"built.{rank}").read_text().split()) == lives, "whoever was not killed was built once"


def test_after_everybody_was_killed_the_items_since_the_checkpoint_come_again(dock: Console, calm: list[str]):
    directory = dock.cwd / "resumed"
    assert sail(dock, directory, "everybody:6").code == 128 + 9
    until(lambda: "running" not in dock.argosy("ps").text, "the end of the meshes")
    assert landed(directory, sail(dock, directory), set()) == calm
    done = [line.split()[0] for line in (directory / "items.0").read_text().splitlines()]
    assert (done.count("5"), done.count("6")) == (2, 1)
