"""How the daemons are executed: by their function, in an interpreter like this one."""

import atexit
import fnmatch
import subprocess
import sys
from pathlib import Path

from argosy.fabric import make_runtime

RUNTIME_FILES = (
    *("warden.lock", "warden.sock", "warden.out", "agent.sock", "agent.out", "agent.log", "agent.log.new"),
    *("zygote-*.out", "keeper-*.sock", "keeper-*.sock.*", "exits", "lifeline", "made", "member.json", "runs"),
)
"""All that Argosy makes in a runtime directory; `runs` is a folder."""

_started: "list[subprocess.Popen[bytes]]" = []


@atexit.register
def _leave_behind() -> None:
    for started in _started:
        if started.poll() is None:
            started.returncode = 0  # It outlives us on purpose: no warning about that.


def is_runtime_file(name: str) -> bool:
    """Whether an entry of a runtime directory is Argosy's."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in RUNTIME_FILES)


def daemon_argv(module: str, *args: str) -> list[str]:
    """The command line of a daemon whose `main` is in `argosy.supervise.agent.<module>`."""
    return [sys.executable, "-c", f"from argosy.supervise.agent.{module} import main; main()", *args]


def start_warden(runtime: Path, agent_pid: int = 0) -> None:
    """Start a warden that outlives the caller; it leaves at once if there is one already.

    An agent that starts one names itself, and is waited for: a second agent would take its runs.
    """
    for earlier in _started:
        earlier.poll()  # A caller that lives long is their parent.
    make_runtime(runtime)  # A leaving warden may just have removed it.
    with open(runtime / "warden.out", "ab") as out:
        started = subprocess.Popen(
            daemon_argv("warden", str(runtime), str(agent_pid)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd="/",
            start_new_session=True,
        )
    _started.append(started)
