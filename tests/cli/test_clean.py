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
from console import Console

from argosy.cli.clean_plan import File, Item, Kind, Removal, Selection, classify, parse_age, parse_size, plan_cleaning
from argosy.core import ConfigError
from argosy.supervise.cgroup import find_parent as cgroup_parent
from argosy.supervise.daemons import RUNTIME_FILES
from argosy.supervise.records.rundir import Owner, RunRecord, index_run, indexed_runs

NOW = 1_000_000.0
DAY = 86400.0


def ended(name: str = "a", *, days: float = 10, size: int = 100, **fields: object) -> Item:
    run = Item(kind="run", name=name, path=f"/r/{name}", since=NOW - days * DAY, ours=[File("run.json", size)])
    return msgspec.structs.replace(run, **fields)


def other(kind: Kind, *, age_s: float = 1e6) -> Item:
    return Item(kind=kind, name="/x", path="/x", since=NOW - age_s, ours=[File(".", 10)])


def paths(decision: Removal) -> list[str]:
    return [file.path for file in decision.files]


def decide(run: Item, **selection: object) -> Removal | None:
    decisions = plan_cleaning([run], msgspec.convert(selection, Selection), NOW)
    return decisions[0] if decisions else None


def action(run: Item, **selection: object) -> str:
    decision = decide(run, **selection)
    return decision.action if decision else "none"


# --- decisions


def test_c4_without_a_selection_nothing_is_decided():
    assert plan_cleaning([ended(), other("daemons"), other("leftover"), other("cache")], Selection(), NOW) == []
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
    run = ended(checkpoints=[File("checkpoints/1/a", 5)])
    assert action(run, everything=True) == "keep"
    decision = decide(run, everything=True, checkpoints=True)
    assert decision is not None
    assert (decision.action, decision.checkpoints) == ("remove", 1)


def test_c3_among_files_of_others_only_the_folder_of_checkpoints_goes():
    run = ended(checkpoints=[File("checkpoints/a.pt", 5), File("data/set.pt", 5)], strangers=2)
    decision = decide(run, everything=True, checkpoints=True)
    assert decision is not None
    assert (decision.action, paths(decision)) == ("part", ["run.json", "checkpoints/a.pt"])


def test_a_shared_directory_loses_only_what_argosy_wrote():
    run = ended(shared="its directory is /home/u", checkpoints=[File("checkpoints/a.pt", 5)])
    decision = decide(run, everything=True, checkpoints=True)
    assert decision is not None
    assert (decision.action, paths(decision)) == ("part", ["run.json"])


def test_leftovers_go_by_name_or_with_everything_but_not_when_young():
    old, young = other("leftover", age_s=60), other("leftover", age_s=1)
    assert action(old, leftovers=True) == "remove"
    assert action(old, everything=True) == "remove"
    assert action(old, everything=True, older_than_s=DAY) == "keep"
    assert action(old, directories=["/r/a"]) == "none"
    assert action(young, everything=True) == "keep"


def test_daemons_and_cache_go_only_with_everything():
    for kind in ("daemons", "cache"):
        assert action(other(kind), everything=True, older_than_s=1.0) == "none"
        assert action(other(kind), leftovers=True) == "none"
        assert action(other(kind), everything=True) == "remove"


def test_daemons_end_first_and_the_cache_goes_last():
    items = [other("cache"), other("leftover"), ended(), other("daemons")]
    decisions = plan_cleaning(items, Selection(everything=True), NOW)
    assert [each.item.kind for each in decisions] == ["daemons", "run", "leftover", "cache"]


@pytest.mark.parametrize(
    ("path", "linked", "whose"),
    [
        ("run.json", False, "ours"),
        ("events", False, "ours"),
        (".run.json.17", False, "ours"),
        ("logs/1/0.0.out", False, "ours"),
        ("logs/12/3.1.err.1", False, "ours"),
        ("logs/1/0.0.error.json", False, "ours"),
        ("finished.json", False, "ours"),
        ("metrics/log", False, "ours"),
        ("metrics/mine", False, "stranger"),
        ("metrics/2/spans", False, "ours"),
        ("hosts/root@host0/metrics/1/start.json", False, "ours"),
        ("hosts/host0/notes.txt", False, "stranger"),
        (".report.html.new", False, "ours"),
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
        if (base / "rt/agent.sock").exists():
            argosy(base, "stop", "--all")


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


def test_runs_of_one_name_are_told_by_their_directories(world: Path):
    make_run(world / "w/runs/one")
    make_run(world / "w/other/one")
    said = argosy(world, "clean")
    assert "/w/runs/one " in said
    assert "/w/other/one " in said


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
    assert "add --checkpoints" in argosy(world, "clean", "--all")
    assert "cannot ask" in argosy(world, "clean", "--all", "--checkpoints", code=2)
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
    os.mkfifo(world / "rt/lifeline")
    for pattern in set(RUNTIME_FILES) - {"runs", "lifeline"}:
        (world / "rt" / pattern.replace("*", "1d92-b5")).touch()
    segment = world / "shm" / f"argosy-{os.getuid()}-{'0' * 12}"
    (segment / "run").mkdir(parents=True)
    (world / "shm/somebody-elses").mkdir()
    for path in (world / "rt", segment):
        os.utime(path, (1.0, 1.0))
    argosy(world, "clean", "leftovers")
    assert tree(world) == {"home", "rt", "shm", "shm/somebody-elses", "w"}, "a directory that the user made stays"


def test_c1_shared_memory_of_a_run_under_another_runtime_directory_stays(world: Path, monkeypatch: pytest.MonkeyPatch):
    (world / "w/slow.py").write_text("import time; print('up', flush=True); time.sleep(100)")
    argosy(world, "run", "-d", "--name", "live", "slow.py")
    (segment,) = (world / "shm").iterdir()
    os.utime(segment, (1.0, 1.0))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("ARGOSY_RUNTIME_DIR", str(world / "rt2"))
        argosy(world, "clean", "leftovers")
    assert segment.exists()
    argosy(world, "stop", "live")


def test_the_cgroup_of_killed_daemons_goes(console: Console):
    """A real one: of a run whose machine, as far as it can tell, lost power."""
    groups = cgroup_parent(console.runtime)
    if groups is None:
        pytest.skip("no cgroup can be made here")
    (console.cwd / "slow.py").write_text("import time; time.sleep(1000)")
    assert console.argosy("run", "-d", "-n", "2", "--name", "cut", "slow.py").code == 0
    console.pid("cut", 1)
    assert [path.name for path in groups.iterdir() if path.is_dir()] != []
    console.cut_power()
    for path in (console.runtime, console.segments, groups):
        os.utime(path, (1.0, 1.0))
    done = console.argosy("clean", "leftovers")
    assert done.code == 0, done.text
    assert not groups.exists(), done.text
    assert not console.runtime.exists()
    assert not console.segments.exists()


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


TRAINS = """
import sys, torch, argosy
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    run = argosy.Run(seed=0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer, replicated=[model])
    for step in run.steps(until=int(sys.argv[1])):
        with step:
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    if sys.argv[2:]:
        raise ValueError("no")

main()
"""


@pytest.mark.system
def test_all_that_a_real_run_wrote_is_argosys(world: Path):
    """A training with metrics and checkpoints that finished, then a launch of the same run that failed."""
    pytest.importorskip("torch")
    (world / "w/train.py").write_text(TRAINS)
    for code, words in ((0, ["3"]), (1, ["4", "fail"])):
        argosy(world, "run", "-n", "2", "--name", "one", "--restart", "never", "train.py", *words, code=code)
    run = world / "w/runs/one"
    assert {"finished.json", "metrics/log", "logs/2/0.0.error.json", "checkpoints"} <= tree(run)
    (found,) = [each for each in json.loads(argosy(world, "clean", "--json")) if each["kind"] == "run"]
    assert found["strangers"] == 0
    argosy(world, "clean", "one", "--checkpoints", "-y")
    assert not run.exists()
