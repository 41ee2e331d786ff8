"""Every command speaks to programs too, with `--json`."""

import json
from typing import Any

import click
import pytest
from console import Console, until

from argosy.cli.commands import COMMANDS, cli

HELLO = "import os, sys\nprint('hello', os.environ.get('RANK'))\nsys.exit(int(sys.argv[1]))\n"
WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "agent"])  # It says nothing.
def test_every_command_takes_it(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for each in command.commands.values() if isinstance(command, click.Group) else [command]:
        assert "--json" in {flag for param in each.params for flag in param.opts}, each.name


def test_a_run_tells_its_events_line_by_line(console: Console) -> None:
    (console.cwd / "hello.py").write_text(HELLO)
    ended = console.argosy("run", "-n", "2", "--json", "hello.py", "3")
    assert ended.code == 3
    lines: list[dict[str, Any]] = [json.loads(line) for line in ended.out.splitlines()]
    assert lines[0]["type"] == "Welcome"
    assert (console.cwd / "runs" / lines[0]["directory"] / "run.json").exists()
    assert {line["pid"] for line in lines if line["type"] == "RankStarted"} == {
        line["pid"] for line in lines if line["type"] == "RankExited"
    }
    assert (lines[-1]["type"], lines[-1]["code"]) == ("LaunchEnded", 3)


def test_a_living_run_is_listed_looked_into_and_stopped(console: Console) -> None:
    def ask(*words: str) -> Any:
        ended = console.argosy(*words)
        assert ended.code == 0, ended.text
        return json.loads(ended.out)

    (console.cwd / "waits.py").write_text(WAITS)
    (console.cwd / "hello.py").write_text(HELLO)
    assert console.argosy("run", "--name", "over", "hello.py", "0").code == 0
    assert ask("run", "-d", "-n", "1", "--json", "--name", "nap", "waits.py")["size"] == 1
    until(lambda: console.argosy("logs", "nap").out, "its first line")
    assert [run["name"] for run in ask("ps", "--json")] == ["nap"]
    assert {run["name"]: run["state"] for run in ask("ps", "-a", "--json")} == {"nap": "running", "over": "ended"}
    assert ask("stacks", "nap", "--json")[0]["ranks"] == [0]
    inside = ask("exec", "--run", "nap", "--json", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert (inside["code"], inside["stdout"]) == (0, "0 of 1\n")
    assert ask("stop", "nap", "--dry-run", "--json") == {"runs": ["nap"], "daemons": False, "done": False}
    assert ask("stop", "nap", "--json") == {"runs": ["nap"], "daemons": False, "done": True}
    assert ask("ps", "--json") == []
    assert ask("why", "nap", "--json")["verdict"] == "stopped"
    assert "nap   stopped (143)" in console.argosy("ps", "-a").text
    assert ask("stop", "--all", "--json") == {"runs": [], "daemons": True, "done": True}


def test_one_run_is_shown_with_its_ranks_alive_or_ended(console: Console) -> None:
    (console.cwd / "waits.py").write_text(WAITS)
    (console.cwd / "hello.py").write_text(HELLO)
    assert console.argosy("run", "-n", "1", "--name", "over", "--max-restarts", "1", "hello.py", "3").code == 3
    assert console.argosy("run", "-d", "-n", "17", "--name", "nap", "waits.py").code == 0
    console.pid("nap", 16)
    (nap,) = json.loads(console.argosy("ps", "nap", "--json").out)
    assert [rank["index"] for rank in nap["ranks"]] == list(range(17))
    (over,) = json.loads(console.argosy("ps", "over", "--json").out)
    assert (over["state"], over["code"], over["restarts"]) == ("ended", 3, 1)
    assert [(rank["generation"], rank["state"]) for rank in over["ranks"]] == [(1, "exit code 3")]
    lines = [line.split() for line in console.argosy("ps", "over").out.decode().splitlines()]
    assert lines[1][:3] == ["over", "failed", "(3)"]
    assert ["0", "exit", "code", "3", "-", "1", "-"] in lines
    assert len(console.argosy("ps", "nap").out.splitlines()) == 21
    assert "no such run" in console.argosy("ps", "nobody").text
