"""`argosy plan`, `sim step` and `graph` on a small script, in one process each."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from argosy.cli.commands import cli
from argosy.core import ConfigError

TESTS = Path(__file__).resolve().parents[1]
MEASURED = TESTS / "cost" / "data" / "vtrain_train.csv"
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from graph.models import tiny

training = tiny(layers=4)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(tests=str(TESTS)))
    return str(path)


def run(*words: str) -> str:
    done = CliRunner().invoke(cli, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.system
def test_plan_ranks_recipes_and_says_that_no_gpu_was_measured(script: str):
    text = run(
        "plan", script, "--chips", "2xh100", "--rows", "4", "--recipe", "fsdp=2 micro=2", "--recipe", "tp=2 micro=4"
    )
    assert "fsdp=2 micro=2" in text
    assert "2 recipes fit" in text
    assert "nothing here was measured on a GPU" in text


def test_plan_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match="say what to plan"):
        run("plan")
    with pytest.raises(ConfigError, match="no such file"):
        run("plan", "nowhere.py", "--chips", "2xh100")
    with pytest.raises(ConfigError, match="the recipe is for 4 ranks, the chips are 2"):
        run("plan", "nowhere.py", "--chips", "2xh100", "--recipe", "fsdp=4")


def test_the_score_is_machine_readable():
    found = json.loads(run("plan", "--score", str(MEASURED), "--json"))
    assert found["constants"] <= 12
    assert {each["set"] for each in found["sizes_left_out"]} == {"multi", "single"}


def test_sim_step_writes_traces(script: str, tmp_path: Path):
    words = ["sim", "step", script, "--recipe", "fsdp=4", "--slow", "1:1.5", "--link-bw", "x0.5"]
    text = run(*words, "--trace", str(tmp_path / "a.json"), "--chakra", str(tmp_path / "a.et"))
    assert "4 ranks fold to" in text
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert (tmp_path / "a.et").read_bytes()[1:2] == b"\x0a"  # The first field of the metadata: a text.


def test_goodput_is_simulated():
    found = json.loads(
        run("sim", "goodput", "--hosts", "100", "--step-s", "5", "--days", "5", "--spares", "2", "--json")
    )
    assert 0.8 < found["goodput"]["median"] < 1
    assert found["best_interval_steps"] > 1
    assert "spare hosts" in run("sim", "goodput", "--hosts", "8", "--step-s", "5", "--days", "5", "--spares", "0")


@pytest.mark.system
def test_a_machine_is_measured_into_a_chip_that_prices_matrix_products(tmp_path: Path):
    from argosy.cost import Op, load_chip, price_op

    path = tmp_path / "mine.toml"
    found = json.loads(run("chip", "measure", str(path), "--budget-s", "2", "--json"))
    assert all(len(found["measured"]["links"][kind]) >= 3 for kind in ("all_reduce", "all_gather", "reduce_scatter"))
    assert found["measured"]["levels"][-1][0] == "memory"
    flops, seconds = found["measured"]["matmul"][2]
    price = price_op(Op("mm", "matmul", "forward", flops=flops), load_chip(str(path)))
    assert price.tier == "measured"
    assert price.seconds == pytest.approx(seconds, rel=1e-3)


def test_shipped_chips_are_listed():
    assert "h100" in run("chip", "list")


def test_graph_show_prints_certificates(script: str):
    found = json.loads(
        run("graph", "show", script, "--recipe", "fsdp=2", "--pass", "canonicalise", "--json", "--layers", "1")
    )
    assert found["certificates"][0]["verdict"] in ("kept", "unchanged")
    assert found["certificates"][0]["difference"] == 0
