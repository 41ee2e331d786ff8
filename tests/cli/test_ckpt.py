"""`argosy ckpt` finds a run by its directory or its name, and does not take what is not there for an empty one."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from console import Console
from warm import warm

from argosy.checkpoint import KeepLast, Saver, StepNotFound, export
from argosy.cli.ckpt import command
from argosy.core import ConfigError

COMMANDS = [["ls"], ["show"], ["verify"], ["diff", "1", "2"], ["export", "hf", "out"], ["prune", "--keep-last", "3"]]


@pytest.mark.parametrize("words", COMMANDS, ids=[words[0] for words in COMMANDS])
def test_a_directory_that_is_not_there_is_an_error_with_a_hint(tmp_path: Path, words: list[str]):
    name, *rest = words
    with pytest.raises(ConfigError, match=f"no such directory: {tmp_path}/nosuch") as caught:
        command.main([name, f"{tmp_path}/nosuch", *rest], standalone_mode=False)
    assert "argosy ps --all" in caught.value.hint


def test_a_run_is_known_by_its_name_before_it_has_a_checkpoint(console: Console):
    assert console.argosy("run", "--name", "young", "--", "true").code == 0
    unknown = console.argosy("ckpt", "ls", "nosuch")
    assert (unknown.code, unknown.text.splitlines()[0]) == (2, "argosy: no such run: nosuch")
    listed = console.argosy("ckpt", "ls", "young")
    said, hint = listed.text.splitlines()
    assert (listed.code, said.startswith("no step was committed in /"), said.endswith("/young")) == (0, True, True)
    assert hint == "  hint: if the script gave its Saver another path, its steps are there: give that path"


def test_what_is_no_checkpoint_is_refused_in_words(console: Console, tmp_path: Path):
    """Every line begins with `argosy:`; nobody sees a traceback."""
    (tmp_path / "noise").write_bytes(b"\x10" + bytes(7) + b"\xff" * 40)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(b"noise")
    words = [
        ["ls", f"{tmp_path}/noise"],
        ["ls", "foo://x", "--json"],
        ["import", "hf", f"{tmp_path}/noise", f"{tmp_path}/run"],
        ["import", "torch", f"{tmp_path}/noise", f"{tmp_path}/run"],
        ["import", "torch", f"{tmp_path}/dcp", f"{tmp_path}/run"],
        ["import", "dcp", f"{tmp_path}/dcp", f"{tmp_path}/run"],
    ]
    for each in words:
        ended = console.run([*warm(), "-m", "argosy", "ckpt", *each])
        assert (ended.code, ended.text.partition(" ")[0]) == (2, "argosy:"), (each, ended.text)
    assert not (tmp_path / "run").exists()


def saved(path: Path, steps: int = 2, cells: int = 100) -> Path:
    with Saver(path, keep=[KeepLast(9)]) as saver:
        for step in range(1, steps + 1):
            saver.save({"w": np.full(cells, step, "<f4")}, step).wait(300)
    return path


def test_people_who_point_at_something_near_a_run_are_told_what_to_give(tmp_path: Path):
    run = saved(tmp_path / "a run")
    export(run, "dcp", tmp_path / "dcp")
    export(run, "hf", tmp_path / "hf")
    export(run, "torch", tmp_path / "x.pt")
    near = {
        next((run / "checkpoints").glob("step-*")): ("this is one step, not a run", f"give {run}, and --step"),
        tmp_path / "dcp": ("a checkpoint of another format", f"argosy ckpt import dcp {tmp_path}/dcp RUN"),
        tmp_path / "hf": ("a checkpoint of another format", f"argosy ckpt import hf {tmp_path}/hf RUN"),
        tmp_path / "x.pt": ("not a directory", f"argosy ckpt import torch {tmp_path}/x.pt RUN"),
    }
    for path, (words, hint) in near.items():
        with pytest.raises(ConfigError, match=words) as caught:
            command.main(["ls", str(path)], standalone_mode=False)
        assert caught.value.hint == hint


@pytest.mark.parametrize("words", [["show"], ["verify"], ["export", "hf", "out"]], ids=lambda words: words[0])
def test_where_no_step_is_the_directory_is_named_and_where_else_to_look(tmp_path: Path, words: list[str]):
    name, *rest = words
    with pytest.raises(StepNotFound, match=f"no step was committed in {tmp_path}") as caught:
        command.main([name, str(tmp_path), *rest], standalone_mode=False)
    assert "give that path" in caught.value.hint


def test_plain_values_are_shown_in_a_line_each_and_whole_to_machines(tmp_path: Path):
    schedule = {"rates": [0.1, {"deep": [1]}], "limit": float("inf"), "seen": list(range(100))}
    state = {"w": np.ones(3, "<f4"), "epoch": 3, "schedule": schedule, "by_number": {1: (2, 3), "a b": None}}
    with Saver(tmp_path) as saver:
        saver.save({**state, "text": "a\nb" * 100, "pair": (np.zeros(1), 5), "loose": {7: np.zeros(1)}}, 1).wait(300)
    shown = CliRunner().invoke(command, ["show", str(tmp_path)]).stdout
    lines = [line.split(maxsplit=1) for line in shown.partition("\n\n")[2].splitlines()]
    assert max(len(value) for _, value in lines) == 80
    found = dict(lines)
    assert found.pop("schedule").startswith("{rates: [0.1, {…}], limit: inf, seen: [0, 1, 2, ")
    assert found.pop("text").startswith("'a\\nba\\nb")
    assert found == {"NAME": "VALUE", "epoch": "3", "by_number": "{1: (2, 3), 'a b': None}", "pair": "(<pair.0>, 5)"}
    whole = json.loads(CliRunner().invoke(command, ["show", str(tmp_path), "--json"]).stdout)
    assert [each["name"] for each in whole["tensors"]] == ["loose.7", "pair.0", "w"]
    assert (whole["step"], set(whole["values"])) == (1, {"epoch", "schedule", "by_number", "text", "pair"})
    assert whole["values"]["schedule"] == {**schedule, "limit": {"$float": "inf"}}


def test_every_command_can_be_read_by_machines(tmp_path: Path):
    run = str(saved(tmp_path / "a run", 3))
    words = [
        ["ls", run],
        ["show", run],
        ["verify", run],
        ["diff", run, "1", "2"],
        ["export", run, "hf", f"{tmp_path}/hf"],
        ["import", "hf", f"{tmp_path}/hf", f"{tmp_path}/again"],
        ["prune", run, "--keep-last", "3", "--dry-run"],
    ]
    assert {each[0] for each in words} == set(command.commands)
    found = {each[0]: json.loads(CliRunner().invoke(command, [*each, "--json"]).stdout) for each in words}
    assert [each["step"] for each in found["ls"]] == [3, 2, 1]
    assert found["verify"] == {"bytes": 1200, "faults": []}
    assert (found["export"]["step"], found["export"]["tensors"], found["import"]["tensors"]) == (3, 1, 1)


def test_of_a_half_deleted_checkpoint_each_command_says_what_is_missing(tmp_path: Path):
    run = saved(tmp_path / "run", 3)
    next(run.rglob("step-000000000003-*/*.safetensors")).unlink()
    shutil.rmtree(next(run.rglob("step-000000000002-*")))
    shown = CliRunner().invoke(command, ["show", str(run)])
    assert shown.stdout.startswith("step 1\n")
    assert shown.stderr == "argosy: step 3 cannot be opened; see `argosy ckpt verify`\n"
    verified = CliRunner().invoke(command, ["verify", str(run)])
    assert verified.exit_code == 1
    assert "rank-00000.safetensors is missing: the segment: expected" in verified.stdout
    assert verified.stdout.endswith("400 B read, 1 fault\n")
    for words in (["show", str(run), "--step", "3"], ["diff", str(run), "1", "3"]):
        with pytest.raises(StepNotFound, match="step 3 is not whole") as caught:
            command.main(words, standalone_mode=False)
        assert "is missing" in caught.value.hint
    with pytest.raises(StepNotFound, match=f"step 2 was not committed in {run}") as caught:
        command.main(["show", str(run), "--step", "2"], standalone_mode=False)
    assert caught.value.hint == "there are 3, 1"


@pytest.mark.parametrize("kind", ["hf", "torch"])
def test_an_export_that_is_interrupted_leaves_nothing_behind(tmp_path: Path, kind: str):
    run, out = saved(tmp_path / "run", 1, cells=20_000_000), tmp_path / "out"
    out.mkdir()
    words = [*warm(), "-m", "argosy", "ckpt", "export", str(run), kind, str(out / "x")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        while not list(out.iterdir()) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=240)
    # It may have been written before the signal came: then it is whole, and was said to be.
    assert [each.name for each in out.iterdir()] == (["x"] if process.returncode == 0 else [])
    assert bool(process.returncode) != said.startswith("step 1 written")


def test_an_export_that_the_disk_has_no_room_for_leaves_nothing_behind(tmp_path: Path):
    run, out = saved(tmp_path / "run", 1, cells=2_000_000), tmp_path / "out"
    out.mkdir()
    small = f"trap '' XFSZ; ulimit -f 1000; exec {sys.executable} -m argosy ckpt export {run} hf {out}/x"
    ended = subprocess.run(["bash", "-c", small], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert ended.stderr.startswith("argosy: File too large")
    assert list(out.iterdir()) == []
