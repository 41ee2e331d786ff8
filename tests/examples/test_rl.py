"""Three roles of reinforcement learning: it learns, and whoever is killed, the weights are the same."""

import re

import pytest
from console import REPOSITORY, Console, Ended
from warm import warm

SCRIPT = str(REPOSITORY / "examples" / "rl_three_roles.py")


def weights_of(ended: Ended) -> set[str]:
    assert ended.code == 0, ended.text
    found = re.search(r"reward (\S+), after 40 steps (\S+)", ended.text)
    assert found is not None, ended.text
    assert float(found[1]) < 0.3 < 0.9 < float(found[2])
    return set(re.search(r"weights (\w+) (\w+)", ended.text).groups())  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.system
def test_a_killed_generator_trainer_and_judge_change_nothing(console: Console):
    calm = weights_of(console.run([*warm(), SCRIPT, "calm"]))
    hard = console.run([*warm(), SCRIPT])
    assert weights_of(hard) == calm
    assert len(calm) == 1, "both trainers have the same"
    assert "rank 1 lost (SIGKILL); resumed step" in hard.text
