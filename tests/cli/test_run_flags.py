"""`argosy run` reads torchrun's command lines, and refuses what it cannot do in a line that says so."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from console import REPOSITORY, Console
from torch.distributed.run import get_args_parser

from argosy.cli import launch_builder
from argosy.cli.launch_builder import Options, choose_restart, parse_dims, parse_threads, read_secrets
from argosy.cli.run import command
from argosy.cli.torchrun_flags import IGNORED, say_ignored, shown_streams, visible_devices
from argosy.control.restart import Restart
from argosy.core import ConfigError
from argosy.supervise.client.launch_builder import check_restart


def parse(*words: str) -> dict[str, Any]:
    """What click makes of a command line, and whether it names a program."""
    context = command.make_context("run", list(words))
    return {**context.params, "program": context.meta.get("argosy.program", False)}


@pytest.mark.parametrize("flag", ["-n", "--ranks", "--nproc-per-node", "--nproc_per_node"])
def test_the_number_of_ranks_has_torchruns_spellings(flag: str):
    assert parse(flag, "4", "train.py")["ranks"] == "4"
    if flag != "-n":
        assert parse(f"{flag}=4", "train.py")["ranks"] == "4"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max_restarts", "3"], "max_restarts", 3),
        (["--max_restarts=3"], "max_restarts", 3),
        (["--master_addr", "localhost"], "master_addr", "localhost"),
        (["--master_port=29501"], "master_port", 29501),
        (["--log_dir", "out"], "log_dir", "out"),
        (["--no_python"], "no_python", True),
        (["--node_rank", "0"], "node_rank", 0),
        (["--rdzv_backend=c10d"], "rdzv_backend", "c10d"),
        (["--rdzv-endpoint", "localhost:0"], "rdzv_endpoint", "localhost:0"),
        (["--local_ranks_filter=0"], "local_ranks_filter", "0"),
        (["-r", "3"], "redirects", "3"),
        (["-t", "3"], "tee", "3"),
        (["-m"], "module", True),
        (["--standalone"], "standalone", True),
    ],
)
def test_torchruns_flags_are_understood(words: list[str], name: str, value: object):
    parsed = parse(*words, "train.py")
    assert parsed[name] == value
    assert parsed["script"] == "train.py"


def test_every_flag_of_torchrun_is_known_and_documented():
    theirs = {
        flag
        for action in get_args_parser()._actions  # pyright: ignore[reportPrivateUsage] - it has no other list
        for flag in action.option_strings
        if "_" not in flag and flag not in ("-h", "--help")
    }
    ours = {flag for param in command.params for flag in param.opts}
    assert theirs - ours == set()
    table = (REPOSITORY / "docs" / "running.md").read_text()
    assert {flag for flag in theirs if flag.startswith("--") and flag not in table} == set()


def test_flags_without_a_meaning_are_said_to_be_ignored_with_the_reason():
    assert say_ignored({"rdzv_id", "rdzv_backend", "ranks"}) == [
        "ignored: --rdzv-backend --rdzv-id (ranks of one host need no rendezvous)"
    ]
    assert len(say_ignored(IGNORED)) == len(set(IGNORED.values()))


def test_a_virtual_local_rank_sees_one_device():
    assert visible_devices(2, {}) == ["0", "1"]
    assert visible_devices(2, {"CUDA_VISIBLE_DEVICES": "4, 6,7"}) == ["4", "6"]
    with pytest.raises(ConfigError, match="a device for each of 2 ranks"):
        visible_devices(2, {"CUDA_VISIBLE_DEVICES": "4"})


def test_roles_devices_and_filters_reach_the_ranks(console: Console):
    (console.cwd / "s.py").write_text(
        "import os\nprint(*(os.environ.get(n) for n in ('RANK', 'ROLE_NAME', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES')))\n"
    )
    words = ["-n", "3", "--role", "trainer", "--virtual_local_rank", "--local_ranks_filter=0,2", "--run_path"]
    ended = console.argosy("run", *words, "--no-python", "s.py", env={"CUDA_VISIBLE_DEVICES": "5,6,7"})
    assert ended.code == 0, ended.text
    lines = sorted(line.partition("] ")[2].strip() for line in ended.out.decode().splitlines())
    assert lines == ["0 trainer 0 5", "2 trainer 0 7"]


def test_flags_behind_the_script_are_the_scripts_own():
    parsed = parse("-n", "2", "train.py", "-n", "7", "--max_restarts", "--", "x_y", "--no_python")
    assert parsed["ranks"] == "2"
    assert parsed["args"] == ("-n", "7", "--max_restarts", "--", "x_y", "--no_python")
    assert not parsed["program"]


def test_two_dashes_before_it_mean_a_program():
    parsed = parse("-n", "2", "--", "./serve", "--port_x", "1")
    assert parsed["program"]
    assert (parsed["script"], parsed["args"]) == ("./serve", ("--port_x", "1"))


def test_a_value_that_looks_like_two_dashes_is_a_value():
    assert not parse("--name", "--", "train.py")["program"]


@pytest.mark.parametrize(
    "words", [["--nope", "x.py"], ["-n"], ["--max-restarts", "-1", "x.py"], ["--grace", "x", "x.py"], []]
)
def test_a_bad_flag_is_refused(words: list[str]):
    with pytest.raises(click.UsageError):
        parse(*words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--nnodes", "2"], "--nnodes needs --dir"),
        (["--nnodes=1:4"], "--nnodes must be one number: 1:4"),
        (["--nnodes=2", "--rdzv-id=x"], "--nnodes needs --node-rank"),
        (["--nnodes=2", "--rdzv-id=x", "--node_rank=2"], "--node-rank must be one of 0-1: 2"),
        (["--hosts=2"], "--hosts needs --on"),
        (["--dry-run"], "--dry-run shows what would be submitted"),
        (["--on=slurm"], "--on slurm needs --hosts"),
        (["--on=local:2", "--spares=2"], "local:2 has 2 hosts, not 3"),
        (["--on=local:2", "--exclude=host0,host1"], "local:2 has 0 hosts, not 1"),
    ],
)
def test_hosts_that_cannot_be_had_are_refused(words: list[str], reason: str, tmp_path: Path):
    script = tmp_path / "s.py"
    script.touch()
    result = CliRunner().invoke(command, [*words, str(script)])
    assert isinstance(result.exception, ConfigError)
    assert reason in str(result.exception)


@pytest.mark.parametrize(("text", "dims"), [("4", {"rank": 4}), (None, {"rank": 1})])
def test_ranks_are_a_mesh_of_one_dimension(text: str | None, dims: dict[str, int]):
    assert parse_dims(Options(ranks=text)) == dims


def test_a_mesh_has_named_dimensions():
    assert parse_dims(Options(mesh="dp=2, tp=3")) == {"dp": 2, "tp": 3}


@pytest.mark.parametrize("text", ["0", "x", "-1", "1.5", "", "xpu", "²"])
def test_bad_numbers_of_ranks_are_refused(text: str):
    with pytest.raises(ConfigError):
        parse_dims(Options(ranks=text or " "))


@pytest.mark.parametrize("text", ["dp", "dp=x", "dp=0", "dp=2,dp=2", "=2"])
def test_bad_meshes_are_refused(text: str):
    with pytest.raises(ConfigError):
        parse_dims(Options(mesh=text))


def test_max_restarts_alone_means_all_ranks_as_for_torchrun():
    assert choose_restart(Options(max_restarts=3)).policy == "all"
    assert choose_restart(Options()).policy == "auto"
    assert choose_restart(Options(max_restarts=0)) == Restart.never()
    assert choose_restart(Options(restart="rank", max_restarts=3)) == Restart.rank(3)


def test_a_group_needs_a_dimension_of_the_mesh():
    with pytest.raises(ConfigError, match="no such dimension: 'pp'\nhint: the mesh has dp"):
        check_restart(choose_restart(Options(restart="group:pp")), {"dp": 2})


def test_redirected_streams_do_not_reach_the_terminal():
    assert shown_streams("0", 2) == [("stdout", "stderr")] * 2
    assert shown_streams("3", 2) == [(), ()]
    assert shown_streams("0:1,1:2", 3) == [("stderr",), ("stdout",), ("stdout", "stderr")]
    assert shown_streams("0:1", 3, "0,2") == [("stderr",), (), ("stdout", "stderr")]


@pytest.mark.parametrize("text", ["4", "x", "0:9", "7:1", "-1:1", "0:1:2", ""])
def test_bad_redirects_are_refused(text: str):
    with pytest.raises(ConfigError):
        shown_streams(text, 2)


def test_threads_are_a_number_or_a_share():
    assert parse_threads(None, 4) == 0
    assert parse_threads("3", 4) == 3
    assert parse_threads("auto", 10_000) == 1
    with pytest.raises(ConfigError):
        parse_threads("0", 1)


def test_secrets_come_from_the_environment_or_a_file(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("from file\n")
    assert read_secrets(("A", f"B={file}"), {"A": "from env"}) == {"A": "from env", "B": "from file"}
    with pytest.raises(ConfigError, match="not in the environment"):
        read_secrets(("MISSING",), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secrets((f"B={tmp_path}/missing",), {})


@pytest.mark.parametrize(("kind", "target"), [("script", "nope.py"), ("script", "."), ("program", "no-such-program")])
def test_what_cannot_be_started_is_refused_before_anything_is(
    kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        launch_builder.check_target(kind, target)


@pytest.mark.parametrize(
    "words", [["--grace", "nan"], ["--grace", "-1"], ["--hang-after", "inf"], ["--hang-timeout", "nan"]]
)
def test_a_time_is_a_finite_number_of_seconds(console: Console, words: list[str]):
    """Not a number would be a wake-up that is never due and never over: an agent that spins."""
    (console.cwd / "hello.py").write_text("print('hello')\n")
    ended = console.argosy("run", *words, "hello.py")
    assert ended.code == 2
    assert "must be a number of seconds" in ended.text
