"""What `argosy clean` decides, and that it removes that and nothing else."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from argosy.core import ConfigError
from argosy.process.run.rundir import Owner, RunRecord, index_run, indexed_runs
from argosy.process.upkeep.cleaning import (
    Found,
    Leftover,
    Removal,
    RunRemains,
    Selection,
    classify,
    parse_age,
    parse_size,
    plan_cleaning,
)
from argosy.process.upkeep.remains import dead_cgroups

NOW = 1_000_000.0
DAY = 86400.0


def ended(name: str = "a", *, days: float = 10, size: int = 100, **fields: object) -> RunRemains:
    given = {"ours": [Found("run.json", size)], **fields}
    return msgspec.convert(
        {"name": name, "directory": f"/r/{name}", "ended_at": NOW - days * DAY, **msgspec.to_builtins(given)},
        RunRemains,
    )


def decide(run: RunRemains, **selection: object) -> Removal | None:
    decisions = plan_cleaning([run], [], msgspec.convert(selection, Selection), NOW)
    return decisions[0] if decisions else None


def action(run: RunRemains, **selection: object) -> str:
    decision = decide(run, **selection)
    return decision.action if decision else "none"


# --- decisions


def test_c4_without_a_selection_nothing_is_decided():
    leftovers = [
        Leftover(kind=kind, path="/x", since=0) for kind in ("daemons", "runtime", "segments", "index", "cache")
    ]
    assert plan_cleaning([ended()], leftovers, Selection(), NOW) == []
    assert not Selection(checkpoints=True).given


def test_age_and_size_must_both_hold():
    old_large, old_small, young_large = ended(size=100), ended(size=10), ended(days=1, size=100)
    limits = {"older_than_s": 7 * DAY, "larger_than": 50}
    assert [action(run, **limits) for run in (old_large, old_small, young_large)] == [
        "remove",
        "keep",
        "keep",
    ]
    assert action(young_large, everything=True, older_than_s=7 * DAY) == "keep"


def test_only_named_runs_go_when_runs_are_named():
    named = frozenset({"/r/a"})
    assert action(ended("a"), directories=named) == "remove"
    assert action(ended("b"), directories=named, everything=True) == "none"


@pytest.mark.parametrize("selection", [{"everything": True}, {"directories": ["/r/a"]}, {"older_than_s": 0.0}])
def test_c1_what_is_alive_stays(selection: dict[str, object]):
    decision = decide(ended(alive="runs on other-host"), **selection, checkpoints=True)
    assert decision is not None
    assert (decision.action, decision.reason, decision.files) == ("keep", "runs on other-host", [])


def test_c2_checkpoints_keep_the_whole_run_until_they_are_asked_for():
    run = ended(checkpoints=[Found("checkpoints/1/a", 5)])
    assert action(run, everything=True) == "keep"
    decision = decide(run, everything=True, checkpoints=True)
    assert decision is not None
    assert (decision.action, decision.checkpoints) == ("remove", 1)


def test_c3_among_files_of_others_only_the_folder_of_checkpoints_goes():
    run = ended(checkpoints=[Found("checkpoints/a.pt", 5), Found("data/set.pt", 5)], strangers=2)
    decision = decide(run, everything=True, checkpoints=True)
    assert decision is not None
    assert (decision.action, decision.files) == ("part", ["run.json", "checkpoints/a.pt"])


def test_a_shared_directory_loses_only_what_argosy_wrote():
    run = ended(shared="its directory is /home/u", checkpoints=[Found("checkpoints/a.pt", 5)])
    decision = decide(run, everything=True, checkpoints=True)
    assert decision is not None
    assert (decision.action, decision.files) == ("part", ["run.json"])


def test_leftovers_go_by_name_or_with_everything_but_not_when_young():
    old, young = (Leftover(kind="runtime", path="/t", since=NOW - age) for age in (60, 1))

    def decided(each: Leftover, selection: Selection) -> list[str]:
        return [decision.action for decision in plan_cleaning([], [each], selection, NOW)]

    assert decided(old, Selection(leftovers=True)) == ["remove"]
    assert decided(old, Selection(everything=True)) == ["remove"]
    assert decided(old, Selection(everything=True, older_than_s=DAY)) == ["keep"]
    assert decided(old, Selection(directories=frozenset({"/r/a"}))) == []
    assert decided(young, Selection(everything=True)) == ["keep"]


def test_daemons_and_cache_go_only_with_everything():
    for kind in ("daemons", "cache", "index"):
        each = Leftover(kind=kind, path="/t")
        assert plan_cleaning([], [each], Selection(everything=True, older_than_s=1.0), NOW) == []
        assert plan_cleaning([], [each], Selection(leftovers=True), NOW) == []
        assert plan_cleaning([], [each], Selection(everything=True), NOW)[0].action == "remove"


@pytest.mark.parametrize(
    ("path", "linked", "whose"),
    [
        ("run.json", False, "ours"),
        ("events", False, "ours"),
        (".run.json.17", False, "ours"),
        ("logs/1/0.0.out", False, "ours"),
        ("logs/12/3.1.err.1", False, "ours"),
        ("incidents/1794780686516-crash-1.0/stacks.txt", False, "ours"),
        ("logs/1/0.0.out", True, "stranger"),
        ("logs/1/notes.txt", False, "stranger"),
        ("logs/notes.txt", False, "stranger"),
        ("sub/run.json", False, "stranger"),
        ("train.py", False, "stranger"),
        ("checkpoints", True, "checkpoint"),
        ("checkpoints/latest", True, "checkpoint"),
        ("out/model.safetensors", False, "checkpoint"),
        ("logs/1/a.pt", False, "checkpoint"),
    ],
)
def test_a_file_is_ours_by_its_exact_place(path: str, linked: bool, whose: str):
    assert classify(path, linked=linked) == whose


def test_times_and_sizes_are_read_as_people_write_them():
    assert [parse_age(text) for text in ("90s", "30min", "12h", "7d", "2w")] == [
        90,
        1800,
        43200,
        604800,
        1209600,
    ]
    assert [parse_size(text) for text in ("1", "2k", "500M", "1G", "1.5GB", "1GiB")] == [
        1, 2048, 500 << 20, 1 << 30, 3 << 29, 1 << 30,
    ]  # fmt: skip
    for wrong in ("", "7", "d", "-1d", "7 years"):
        with pytest.raises(ConfigError, match="not a time"):
            parse_age(wrong)
    for wrong in ("", "G", "-1G", "1X"):
        with pytest.raises(ConfigError, match="not a size"):
            parse_size(wrong)


# --- on disk


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home, a /tmp and a /dev/shm of our own; short, for sockets."""
    with tempfile.TemporaryDirectory(prefix="c-") as name:
        base = Path(name)
        for folder in ("home", "shm", "w"):
            (base / folder).mkdir()
        variables = {
            "ARGOSY_RUNTIME_DIR": base / "rt",
            "ARGOSY_SHM_DIR": base / "shm",
            "XDG_STATE_HOME": base / "home/state",
            "XDG_CACHE_HOME": base / "home/cache",
            "HOME": base / "home",
            "ARGOSY_LINGER_S": "60",
        }
        for variable, value in variables.items():
            monkeypatch.setenv(variable, str(value))
        yield base


def argosy(world: Path, *args: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "argosy", *args]
    done = subprocess.run(
        command,
        cwd=world / "w",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def make_run(directory: Path, *, age_s: float = 100.0) -> Path:
    """A run as one that ended leaves it."""
    (directory / "logs/1").mkdir(parents=True)
    (directory / "incidents").mkdir()
    (directory / "logs/1/0.0.out").write_text("hello\n")
    (directory / "events").write_bytes(b"")
    now = time.time()
    record = RunRecord(
        name=directory.name, argv=["a.py"], cwd="/", size=1, host="h", launch=1, state="ended", code=0,
        started_at=now - age_s - 1, ended_at=now - age_s,
    )  # fmt: skip
    (directory / "run.json").write_bytes(msgspec.json.encode(record))
    index_run(directory, directory.name)
    return directory


def tree(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_without_a_selection_it_lists_and_tells_how(world: Path):
    assert "nothing to clean" in argosy(world, "clean")
    make_run(world / "w/runs/one")
    before = tree(world)
    said = argosy(world, "clean")
    assert "one " in said
    assert "--older-than 7d" in said
    assert tree(world) == before
    assert json.loads(argosy(world, "clean", "--json"))[0]["name"] == "one"


def test_a_dry_run_prints_the_same_table_and_touches_nothing(world: Path):
    make_run(world / "w/runs/one")
    make_run(world / "w/runs/two")
    before = tree(world)
    rehearsed = argosy(world, "clean", "--all", "--dry-run").splitlines()
    assert tree(world) == before
    done = argosy(world, "clean", "--all").splitlines()
    assert rehearsed[:-1] == done[:-1]
    assert tree(world) == {"home", "home/state", "shm", "w"}


def test_age_selects_and_the_index_forgets(world: Path):
    make_run(world / "w/runs/old", age_s=8 * DAY)
    make_run(world / "w/runs/new", age_s=6 * DAY)
    argosy(world, "clean", "--older-than", "7d")
    assert [name for name, _ in indexed_runs()] == ["new"]
    assert os.listdir(world / "w/runs") == ["new"]


def test_files_that_argosy_did_not_write_stay(world: Path):
    run = make_run(world / "w/runs/one")
    (run / "notes.txt").write_text("mine")
    (run / "logs/1/mine.txt").write_text("mine")
    argosy(world, "clean", "one")
    assert tree(run) == {"notes.txt", "logs", "logs/1", "logs/1/mine.txt"}
    assert indexed_runs() == []


def test_checkpoints_go_only_with_both_words(world: Path):
    run = make_run(world / "w/runs/one")
    (run / "weights").mkdir()
    (run / "weights/a.safetensors").write_text("w")
    before = tree(run)
    assert "see --checkpoints" in argosy(world, "clean", "--all")
    assert "nobody can be asked" in argosy(world, "clean", "--all", "--checkpoints", code=2)
    assert tree(run) == before
    argosy(world, "clean", "--all", "--checkpoints", "-y")
    assert not (world / "w/runs").exists()


def test_links_are_not_followed(world: Path):
    outside = world / "outside"
    (outside / "1").mkdir(parents=True)
    (outside / "1/0.0.out").write_text("precious")
    run = make_run(world / "w/runs/one")
    for path in (run / "logs/1/0.0.out", run / "logs/1", run / "logs"):
        path.unlink() if path.is_file() else path.rmdir()
    (run / "logs").symlink_to(outside)
    (run / "checkpoints").symlink_to(outside)
    argosy(world, "clean", "--all", "--checkpoints", "-y")
    assert tree(outside) == {"1", "1/0.0.out"}
    assert tree(run) == {"logs", "checkpoints"}


def test_a_run_in_the_home_directory_leaves_the_home_directory(world: Path):
    home = make_run(world / "home")
    (home / "checkpoints").mkdir()
    (home / "checkpoints/a.pt").write_text("w")
    (home / "model.pt").write_text("w")
    argosy(world, "clean", "--all", "--checkpoints", "-y")
    assert tree(home) == {"checkpoints", "checkpoints/a.pt", "model.pt", "state"}


def test_c1_a_run_whose_warden_holds_its_lock_is_alive(world: Path):
    run = make_run(world / "w/runs/one")
    (world / "rt").mkdir()
    owner = Owner(os.uname().nodename, str(world / "rt"), "x")
    (run / "owner.json").write_bytes(msgspec.json.encode(owner))
    before = tree(run)
    with open(world / "rt/warden.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "alive" in argosy(world, "clean", "--all", "--checkpoints", "-y")
        assert tree(run) == before
        assert (world / "rt").exists()
    argosy(world, "clean", "--all")
    assert not run.exists()


def test_c1_a_run_of_another_host_may_be_alive(world: Path):
    run = make_run(world / "w/runs/one")
    (run / "owner.json").write_bytes(msgspec.json.encode(Owner("far-away", str(world / "rt"), "x")))
    assert "runs on far-away" in argosy(world, "clean", "--all")
    assert (run / "run.json").exists()


def test_leftovers_of_killed_daemons_go(world: Path):
    (world / "rt/runs").mkdir(parents=True)
    for name in ("warden.lock", "keeper-1d92-b5.sock", "keeper-1d92-b5.sock.lock", "keeper-1d92-b5.sock.log"):
        (world / "rt" / name).touch()
    segment = world / "shm" / f"argosy-{os.getuid()}-{'0' * 12}"
    (segment / "run").mkdir(parents=True)
    (world / "shm/somebody-elses").mkdir()
    for path in (world / "rt", segment):
        os.utime(path, (1.0, 1.0))
    argosy(world, "clean", "leftovers")
    assert tree(world) == {"home", "shm", "shm/somebody-elses", "w"}


def test_a_cgroup_is_dead_when_its_agent_is_gone_and_nobody_is_in_it(tmp_path: Path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    for number, (pid, populated) in enumerate([(gone.pid, 0), (gone.pid, 1), (os.getpid(), 0)]):
        group = tmp_path / f"argosy-{os.getuid()}-{number:08d}-{pid}"
        group.mkdir()
        (group / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
    assert [path.name for path in dead_cgroups(tmp_path)] == [f"argosy-{os.getuid()}-00000000-{gone.pid}"]


def test_a_runtime_directory_with_files_of_others_stays(world: Path):
    (world / "rt").mkdir()
    for name in ("warden.lock", "thesis.tex"):
        (world / "rt" / name).touch()
    os.utime(world / "rt", (1.0, 1.0))
    assert "thesis.tex" in argosy(world, "clean", "leftovers", code=1)
    assert (world / "rt/thesis.tex").exists()


def test_everything_leaves_nothing_of_a_real_run_and_its_daemons(world: Path):
    (world / "w/ok.py").write_text("print('hello')")
    (world / "w/slow.py").write_text("import time; print('up', flush=True); time.sleep(100)")
    argosy(world, "run", "-d", "--name", "live", "slow.py")
    try:
        argosy(world, "run", "-n", "2", "ok.py")
        decisions = json.loads(argosy(world, "clean", "--all", "--json"))
        assert {each["name"] for each in decisions if each["kind"] in ("run", "daemons") and not each["done"]} == {
            "live",
            str(world / "rt"),
        }
        assert os.listdir(world / "w/runs") == ["live"]
    finally:
        argosy(world, "stop", "live")
    argosy(world, "clean", "--all", "--checkpoints", "-y")
    assert tree(world) == {"home", "home/state", "home/cache", "shm", "w", "w/ok.py", "w/slow.py"}
