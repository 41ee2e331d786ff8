"""A training whose items come from actors ends with the same bits whichever role is killed, each item once."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from meshes import owner
from seeds import each

from argosy.core import PeerLost
from argosy.train import read_log

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.append(str(SCRIPTS))
import roles  # noqa: E402 - the ranks import it from there, too.

STEPS = 9


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("dock")
    with owner(place):
        yield place


@pytest.fixture(scope="module")
def calm(dock: Path) -> list[str]:
    """The digests of a training that nobody disturbs."""
    return sail(dock / "calm")


def sail(directory: Path, *deaths: str, unsaid: set[int] | None = None) -> list[str]:
    """The digests, once rows and items are seen to be complete; `unsaid`: steps whose trainer died before it wrote."""
    digests = roles.drive(directory, STEPS, *deaths)
    assert [row.step for row in read_log(directory)] == list(range(1, STEPS + 1))
    for rank in range(2):
        found: dict[int, str] = {}
        for line in (directory / f"items.{rank}").read_text().splitlines():
            number, items = line.split(maxsplit=1)
            # After a resume steps are done again, with the same items.
            assert found.setdefault(int(number), items) == items
        assert set(found.values()) == {" ".join(str(3 * rank + place) for place in range(3))}
        assert set(found) | (unsaid or set()) == set(range(STEPS))
    return digests


ALL = ["trainer 0.0:constructor:0", "trainer 1.0:before vote:4", "generator 0.0:before put:4", "judge 0.0:score:4"]


@pytest.mark.system
@pytest.mark.parametrize(
    "deaths",
    [
        ["generator 1.0:before put:0", "generator 0.0:after put:3", "generator 1.1:before put:5"],
        [*ALL, "trainer 0.1:after vote:6", "judge 0.1:score:8"],
    ],
    ids=["generators", "all of them"],
)
def test_whichever_role_is_killed_the_bits_are_the_same(
    dock: Path, calm: list[str], deaths: list[str], request: pytest.FixtureRequest
):
    directory = dock / request.node.callspec.id
    assert sail(directory, *deaths, unsaid={6}) == calm
    for rank in range(2):
        lives = 1 + sum(death.startswith(f"trainer {rank}.") for death in deaths)
        assert len((directory / f"built.{rank}").read_text().split()) == lives, "whoever was not killed was built once"


@pytest.mark.system
def test_after_all_were_killed_the_items_since_the_checkpoint_come_again(dock: Path, calm: list[str]):
    directory = dock / "resumed"
    with pytest.raises(PeerLost, match="SIGKILL"):
        roles.drive(directory, STEPS, "trainers:6")
    assert sail(directory) == calm
    done = [line.split()[0] for line in (directory / "items.0").read_text().splitlines()]
    assert (done.count("5"), done.count("6")) == (2, 1)


def fate(seed: int) -> list[str]:
    """Who dies where: up to four of them, a replacement too now and then."""
    chance = random.Random(seed)
    places = {
        "trainer": ["forward", "before vote", "after vote"],
        "generator": ["before put", "after put"],
        "judge": ["score"],
    }
    members = [("trainer", 0), ("trainer", 1), ("generator", 0), ("generator", 1), ("judge", 0)]
    deaths: list[str] = []
    for role, rank in chance.sample(members, chance.randint(1, 4)):
        steps = sorted(chance.sample(range(STEPS), chance.choice([1, 1, 2])))
        deaths += [f"{role} {rank}.{life}:{chance.choice(places[role])}:{step}" for life, step in enumerate(steps)]
    return deaths


@pytest.mark.soak
@each("seed", range(200))
def test_random_deaths(dock: Path, calm: list[str], seed: int):
    # Where a trainer dies after the vote nobody may have written which items it had.
    assert sail(dock / f"seed{seed}", *fate(seed), unsaid=set(range(STEPS))) == calm
