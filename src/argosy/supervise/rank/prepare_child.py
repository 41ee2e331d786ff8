"""From fork to the point where a rank's program begins: what forked and executed ranks have in common."""

import contextlib
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

from argosy.supervise.cgroup import MARK, join
from argosy.supervise.environment import open_environment, take_limits
from argosy.supervise.lifeline import tie_lifeline
from argosy.supervise.messages import RankSpec


def settle(runtime: Path, run: str, spec: RankSpec, fds: Sequence[int], keep: int = 2) -> dict[str, str]:
    """Make this fresh child the rank: group, cgroup, descriptors, output, lifeline, limits; returns its environment.

    `fds` are the sealed environment and, if the rank has one, standard input. Every inherited descriptor but
    `keep` is closed. Output goes to files opened here, so that no reader's death can hurt.
    """
    os.setpgid(0, 0)
    join(spec.cgroup)
    environment = open_environment(fds[0])
    variables = {**spec.defaults, **environment.variables, **environment.secrets, **spec.variables}
    variables[MARK] = f"{run}/{spec.rank}"
    out = _open_log(spec.out)
    err = _open_log(spec.err)
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((fds[1] if len(fds) > 1 else null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    os.closerange(3, keep)
    os.closerange(max(keep, 2) + 1, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20))
    tie_lifeline(runtime)
    take_limits(environment.limits)
    return variables


def reset_signals() -> None:
    """Signals as a fresh interpreter has them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) != signal.SIG_DFL:  # A write to each would copy what is shared.
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _open_log(path: str) -> int:
    """Open the log, or /dev/null if the disk refuses: a run does not end because its log cannot be written."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
