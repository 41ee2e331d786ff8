"""`tools/sandbox.py` gives a command its own directories, and leaves neither files nor processes behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

TOOL = [sys.executable, str(Path(__file__).resolve().parents[2] / "tools" / "sandbox.py")]
SANDBOX = [*TOOL, sys.executable, "-c"]
SHOW = """
import json, os
names = ["ARGOSY_RUNTIME_DIR", "ARGOSY_SHM_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME", "TMPDIR"]
print(json.dumps({name: os.environ[name] for name in names}), flush=True)
"""


def homes(shown: str) -> set[Path]:
    """The directories directly below /tmp and /dev/shm that were given to the command."""
    paths = [Path(value) for value in json.loads(shown).values()]
    return {Path("/", *path.parts[1:3] if path.parts[1] == "tmp" else path.parts[1:4]) for path in paths}


def test_there_is_one_directory_in_each_place_and_it_is_removed():
    program = f"{SHOW}\nopen(os.environ['TMPDIR'] + '/f', 'w').close(); raise SystemExit(7)"
    run = subprocess.run([*SANDBOX, program], capture_output=True, text=True)
    assert run.returncode == 7
    given = homes(run.stdout)
    assert {path.parent for path in given} == {Path("/tmp"), Path("/dev/shm")}
    assert len(given) == 2
    assert [path for path in given if path.exists()] == []


def test_a_terminated_sandbox_removes_its_directories():
    with subprocess.Popen([*SANDBOX, f"{SHOW}\nimport time; time.sleep(60)"], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        given = homes(run.stdout.readline())
        assert all(path.is_dir() for path in given)
        run.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    assert [path for path in given if path.exists()] == []


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def test_a_process_left_behind_is_named_ended_and_a_failure():
    program = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(left.pid)
"""
    run = subprocess.run([*SANDBOX, program], capture_output=True, text=True)
    pid = int(run.stdout)
    assert run.returncode == 1
    assert f"pid {pid}" in run.stderr
    assert state_of(pid) in ("gone", "Z")


def test_suites_run_one_after_another_and_a_killed_one_frees_the_machine(tmp_path: Path):
    env = {**os.environ, "ARGOSY_SUITE_LOCK": str(tmp_path / "lock")}
    program = "import os; print(os.getpid(), flush=True); input()"
    alone = [*TOOL, "--alone", sys.executable, "-c", program]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(alone, env=env, **streams)
    assert first.stdout
    held = int(first.stdout.readline())
    with first, subprocess.Popen(alone, env=env, **streams) as second:
        assert second.stdout
        assert second.stderr
        assert f"waiting for another suite on this machine: pid {first.pid}, " in second.stderr.readline()
        first.kill()
        os.kill(held, signal.SIGKILL)
        assert second.stdout.readline().strip().isdecimal()
        assert second.communicate("\n")[1] == ""
        assert second.returncode == 0
