"""The same command on each node, as under torchrun: the variables are torchrun's, and nobody else gets in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, free_port, until
from hosts.fleet import SCRIPTS

pytest.importorskip("cryptography")
pytestmark = pytest.mark.system


def variables(directory: Path) -> list[dict[str, str]]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(4)]


def test_two_nodes_have_the_variables_that_torchrun_sets(console: Console):
    shared = ["--nnodes", "2", "--master_addr", "localhost", "--nproc-per-node", "2", "--rdzv-id", "job7"]
    ours, theirs = console.cwd / "ours", console.cwd / "theirs"
    ours.mkdir()
    theirs.mkdir()
    script = str(SCRIPTS / "variables.py")
    # A node that comes before the head waits for it.
    nodes = [
        console.start("run", *shared, "--node-rank", rank, script, str(ours), out=console.cwd / f"node{rank}.out")
        for rank in ("1", "0")
    ]
    for node in nodes:
        assert node.wait(PATIENCE_S) == 0, [(console.cwd / f"node{rank}.out").read_text() for rank in (0, 1)]
    endpoint = ["--master_port", str(free_port())]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *shared, *endpoint, "--node_rank", rank, script, theirs],
            cwd=console.cwd,
            env=console.env,
        )
        for rank in ("0", "1")
    ]
    assert [agent.wait(PATIENCE_S) for agent in agents] == [0, 0]
    same = [{**line, "MASTER_ADDR": ""} for line in variables(ours)]
    assert same == [{**line, "MASTER_ADDR": ""} for line in variables(theirs)]
    assert list((console.cwd / "runs/job7/join").iterdir()) == []


def test_the_failure_on_one_node_is_the_exit_code_of_both(console: Console):
    words = ["--nnodes", "2", "--dir", str(console.cwd / "runs/both"), "-n", "1"]
    script = ["--", "sh", "-c", "test $GROUP_RANK = 1 && exit 7; exec sleep 1000"]
    nodes = [
        console.start("run", *words, "--node-rank", rank, *script, out=console.cwd / f"node{rank}.out")
        for rank in ("0", "1")
    ]
    assert [node.wait(PATIENCE_S) for node in nodes] == [7, 7]
    assert "rank 1 failed: exit code 7 on node1" in console.argosy("why", "both").text


def test_a_node_that_is_told_to_end_ends_the_run(console: Console):
    words = ["--nnodes", "2", "--dir", str(console.cwd / "runs/told"), "-n", "1", "--", "sleep", "1000"]
    nodes = [console.start("run", "--node-rank", rank, *words, out=console.cwd / f"node{rank}.out") for rank in "01"]
    until(lambda: [rank["state"] for rank in console.ps("told").get("ranks", [])] == ["running"] * 2, "two ranks")
    nodes[1].terminate()
    assert nodes[0].wait(PATIENCE_S) == 143
    assert nodes[1].wait(PATIENCE_S) == 143
    assert not list(Path(f"/tmp/argosy-{os.getuid()}").glob("*.node1"))
