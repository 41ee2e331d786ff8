"""The examples of actors do what their first lines promise; a pool and a service lose a process on the way."""

import re
import sys

from console import REPOSITORY, Console


def shown(console: Console, name: str) -> str:
    ended = console.run([sys.executable, str(REPOSITORY / "examples" / name)])
    assert ended.code == 0, ended.text
    return ended.text


def test_a_pool_finishes_every_job_although_a_worker_is_killed(console: Console) -> None:
    text = shown(console, "worker_pool.py")
    assert "rank 2 replaced, generation 1" in text
    assert "40 results" in text


def test_learners_teach_a_parameter_server(console: Console) -> None:
    errors = [float(found) for found in re.findall(r"largest error (\S+)", shown(console, "parameter_server.py"))]
    assert len(errors) == 4
    assert errors[-1] < 0.01 < errors[0]


def test_four_ranks_find_a_service_and_find_it_again_when_it_was_replaced(console: Console) -> None:
    text = shown(console, "judge.py")
    assert "scores [10, 11, 12, 13]" in text
    assert "rank 0 replaced, generation 1" in text
    assert "scores [20, 21, 22, 23]" in text
