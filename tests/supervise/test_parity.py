"""`argosy run s.py` is `python -u s.py`: the same output, exit code and traceback, byte for byte.

Argosy's own remarks are lines on stderr that begin with `argosy: `; they are set aside before comparing.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, Ended, terminal

SCRIPTS = Path(__file__).with_name("scripts")

EXITS = [
    *("text", "three", "large", "larger", "tuple", "_exit", "interrupt", "interrupted"),
    *("segv", "abort", "term", "thread", "daemon", "hook", "pipe", "closed", "no_torch"),
]
CASES = [
    "facts.py --lr 3e-4 -- positional",
    "./facts.py",
    "fleet/../facts.py",
    *(f"pool.py {method}" for method in ("fork", "spawn", "forkserver")),
    pytest.param("loader.py", marks=pytest.mark.system),
    "endings.py",
    *(f"exits.py {how}" for how in EXITS),
    "raises.py",
    pytest.param("torch_raises.py", marks=pytest.mark.system),
    "speaks.py",
    "reads.py",
    "library.py",
    "event_loop.py",
    "-m fleet",
    "-m fleet.ship one two",
    "-m fleet.ship sink",
    "broken.py",
    "imports_broken.py",
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """One terminal for the file, in a copy of the scripts."""
    place = tmp_path_factory.mktemp("parity") / "scripts"
    shutil.copytree(SCRIPTS, place, ignore=shutil.ignore_patterns("__pycache__"))
    (place / "broken.py").write_text("import os\n\ndef f(:\n    pass\n")
    (place / "imports_broken.py").write_text("import broken\n")
    with terminal(place) as console:
        del console.env["OMP_NUM_THREADS"]  # How many threads a rank has is a subject here.
        yield console


def without_remarks(err: bytes) -> bytes:
    """Without what Argosy says, and what multiprocessing's tracker says of a race of its own, with python alone too."""
    lines = err.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"argosy: ") and b"resource_tracker" not in line)


def both(console: Console, words: str, stdin: bytes = b"") -> tuple[Ended, Ended]:
    plain = console.run([console.python, "-u", *words.split()], stdin=stdin)
    return plain, console.argosy("run", *words.split(), stdin=stdin)


@pytest.mark.parametrize("words", CASES)
def test_a_script_cannot_tell(shared: Console, words: str) -> None:
    plain, ours = both(shared, words, stdin=b"one\ntwo three\nfour")
    assert ours.out.splitlines() == plain.out.splitlines()
    assert (ours.out, without_remarks(ours.err)) == (plain.out, without_remarks(plain.err))
    assert ours.code == plain.code


def test_files_left_open_are_whole(shared: Console) -> None:
    written = shared.cwd / "left_open.txt"
    for words in (["-u", "endings.py"], ["-m", "argosy", "run", "endings.py"]):
        written.unlink(missing_ok=True)
        shared.run([shared.python, *words])
        assert written.read_text() == "all of it"


def test_a_missing_script_is_a_plain_error(shared: Console) -> None:
    plain, ours = both(shared, "no_such_script.py")
    assert plain.code == 2
    assert ours.code == 2
    assert b"no_such_script.py" in ours.err
    assert b"Traceback" not in ours.err


def test_an_edited_module_is_seen(shared: Console) -> None:
    """Also when size and time of the file stay the same to the second, as in a quick edit."""
    (shared.cwd / "edited_main.py").write_text("import edited\nprint(edited.word)\n")
    for word in ("aye", "nay", "aye"):
        (shared.cwd / "edited.py").write_text(f"word = {word!r}\n")
        shutil.rmtree(shared.cwd / "__pycache__", ignore_errors=True)  # python's own staleness is not ours
        assert shared.argosy("run", "edited_main.py").out.decode() == f"{word}\n"


def test_a_users_module_wins_over_one_of_ours_with_its_name(shared: Console) -> None:
    place = shared.cwd / "shadow"
    place.mkdir()
    for name in ("msgspec", "boot", "core", "secrets", "click"):
        (place / f"{name}.py").write_text("mine = True\n")
    (place / "main.py").write_text(
        "import boot, core, msgspec, secrets, click\n"
        "print([m.__file__ for m in (boot, core, msgspec, secrets, click)])\n"
    )
    plain, ours = both(shared, "shadow/main.py")
    assert ours.out == plain.out


def test_the_environment_is_the_users_plus_our_own(shared: Console) -> None:
    """No variable of torchrun's: a script without -n may start its own ranks, or be one of another launcher's."""
    (shared.cwd / "environ.py").write_text("import json, os\nprint(json.dumps(dict(os.environ)))\n")
    env = {"A_USERS_OWN": "caf\u00e9 = 1", "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}
    plain = shared.run([shared.python, "environ.py"], env=env)
    ours = shared.argosy("run", "environ.py", env=env)
    numbered = shared.argosy("run", "-n", "1", "environ.py", env=env)
    before, after = (pairs(ended) for ended in (plain, ours))
    assert {name: value for name, value in after.items() if not name.startswith("ARGOSY_")} == {
        name: value for name, value in before.items() if not name.startswith("ARGOSY_")
    }
    assert {name: pairs(numbered)[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }


def pairs(ended: Ended) -> dict[str, str]:
    found: dict[str, str] = json.loads(ended.out)
    return found


@pytest.mark.system
def test_nobody_seeds_what_the_user_did_not(shared: Console) -> None:
    """Two ranks in two runs draw eight different numbers; what the user seeds is the same everywhere."""
    lines: list[list[str]] = []
    for _ in range(2):
        ended = shared.argosy("run", "-n", "2", "seeds.py")
        assert ended.code == 0, ended.text
        words = [line.split() for line in ended.out.decode().splitlines()]
        lines += [line[line.index(kind) :] for kind in ("drawn", "seeded") for line in words if kind in line]
    drawn = [line for line in lines if line[0] == "drawn"]
    assert len(drawn) == 4
    for column in range(2, 7):
        assert len({line[column] for line in drawn}) == 4, f"column {column} repeats: {drawn}"
    assert {line[-1] for line in drawn} == {"1"}, "two ranks on this machine get one thread each, as torchrun"
    plain, alone = (ended.out.decode().split() for ended in both(shared, "seeds.py"))
    assert {tuple(line[2:]) for line in lines if line[0] == "seeded"} == {tuple(plain[-3:])}
    assert alone[-3:] == plain[-3:]
    assert alone[7] == plain[7], "one rank has all threads, as python"
