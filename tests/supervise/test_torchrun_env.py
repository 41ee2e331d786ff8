"""Every variable and habit of torchrun that a script may lean on, seen in the ranks of `argosy run`."""

import json
from pathlib import Path
from typing import Any

import pytest
from console import Console, free_port, terminal
from warm import warm

SCRIPT = """\
import json, os, sys
facts = {"environ": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd(), "file": __file__}
with open(f"{sys.argv[1]}.{os.environ['RANK']}.json", "w") as out:
    json.dump(facts, out)
"""

OWN_VALUES = {
    "MASTER_PORT": "a port of its own",
    "MASTER_ADDR": "loopback by number: no name is looked up",
    "TORCHELASTIC_RUN_ID": "the name of the run",
    "TORCHELASTIC_ERROR_FILE": "in a directory of its own",
}
"""Set by both, with values that differ, and why."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What ranks 0 and 1 saw, under torchrun and under argosy, with the same flags."""
    place = tmp_path_factory.mktemp("environment")
    (place / "look.py").write_text(SCRIPT)
    flags = ["--nproc-per-node", "2", "--max-restarts", "3", "look.py"]
    args = ["--place=${local_rank}", "a b", ""]
    with terminal(place) as console:
        torchrun = console.run([*warm(), "-m", "torch.distributed.run", *flags, "torchrun", *args])
        argosy = console.argosy("run", *flags, "argosy", *args)
    assert (torchrun.code, argosy.code) == (0, 0), torchrun.text + argosy.text
    return {name: [read(place / f"{name}.{rank}.json") for rank in (0, 1)] for name in ("torchrun", "argosy")}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_every_variable_of_torchrun_is_set(seen: dict[str, list[dict[str, Any]]], rank: int) -> None:
    theirs, ours = (seen[name][rank]["environ"] for name in ("torchrun", "argosy"))
    assert theirs.keys() - ours.keys() == set()
    differ = {name for name in theirs if ours[name] != theirs[name]}
    assert differ <= OWN_VALUES.keys(), {name: (theirs[name], ours[name]) for name in differ}


def test_values_of_our_own_are_usable(seen: dict[str, list[dict[str, Any]]]) -> None:
    first, second = (found["environ"] for found in seen["argosy"])
    assert first["MASTER_ADDR"] in {"127.0.0.1", "localhost"}
    assert 0 < int(first["MASTER_PORT"]) < 65536
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["TORCHELASTIC_RUN_ID"] == second["TORCHELASTIC_RUN_ID"] != ""
    assert first["TORCHELASTIC_ERROR_FILE"] != second["TORCHELASTIC_ERROR_FILE"]


def test_arguments_are_as_torchrun_gives_them(seen: dict[str, list[dict[str, Any]]]) -> None:
    for theirs, ours in zip(seen["torchrun"], seen["argosy"], strict=True):
        assert ours["argv"][2:] == theirs["argv"][2:]
        assert (ours["cwd"], ours["file"]) == (theirs["cwd"], theirs["file"])


@pytest.mark.system
def test_the_master_port_asked_for_is_used(console: Console) -> None:
    """torch's own store answers there, and both ranks meet."""
    (console.cwd / "meet.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "print('met', int(total), os.environ['MASTER_PORT']) if dist.get_rank() == 0 else None\n"
        "dist.destroy_process_group()\n"
    )
    port = str(free_port())
    ended = console.argosy("run", "-n", "2", "--master-port", port, "meet.py")
    assert ended.code == 0, ended.text
    assert f"met 2 {port}" in ended.out.decode()
