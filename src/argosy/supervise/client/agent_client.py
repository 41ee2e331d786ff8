"""How a command reaches the agent of this host, starting warden and agent if there are none."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from argosy.control import Launch
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.fabric import Link, connect, runtime_dir
from argosy.supervise.client.runs_without_agent import runs_between
from argosy.supervise.daemons import start_warden
from argosy.supervise.messages import (
    LaunchRun,
    ListRuns,
    Message,
    RankInfo,
    Refused,
    RunInfo,
    Runs,
    Shutdown,
    ToClient,
    WatchRun,
    Welcome,
    to_client,
)
from argosy.supervise.records.owner import is_elsewhere, read_owner
from argosy.supervise.records.rundir import find_run, indexed_runs, read_record

START_S = 60.0
FILES_MIN = 64
ANSWER_S = 30.0
SILENCE_S = 5.0
"""After so long without an answer, the terminal says that we wait."""


def connect_agent(runtime: Path | None = None) -> Link[ToClient]:
    """Connect to the agent.

    Raises:
        PeerLost: there is none.
    """
    return connect((runtime or runtime_dir()) / "agent.sock", to_client, "the agent")


def reach_agent(start_after_s: float = 0.0, runtime: Path | None = None) -> Link[ToClient]:
    """Connect to the agent; start warden and agent if none answers for `start_after_s`.

    Raises:
        DeadlinePassed: they did not come up.
    """
    runtime = runtime or runtime_dir()
    deadline = time.monotonic() + START_S
    start_at = time.monotonic() + start_after_s
    while True:
        try:
            return connect_agent(runtime)
        except PeerLost:
            if time.monotonic() > deadline:
                hint = f"what they said is in {runtime}/*.out"
                raise DeadlinePassed("the start of Argosy's daemons", START_S, hint=hint) from None
        if time.monotonic() >= start_at:
            start_at = time.monotonic() + 5.0
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            if most < FILES_MIN:
                raise ConfigError(
                    f"at most {most} files may be open, Argosy's daemons need {FILES_MIN}", hint="ulimit -n 1024"
                )
            start_warden(runtime)
        time.sleep(0.005)


def ask(link: Link[ToClient], message: Message, fds: Sequence[int] = (), timeout_s: float = ANSWER_S) -> ToClient:
    """Send one question and return its answer.

    Raises:
        ConfigError: the agent refused.
        DeadlinePassed: it does not answer.
    """
    link.send(message, fds)
    try:
        answer = _wait_for_answer(link, timeout_s)
    except DeadlinePassed as error:
        hint = "if it hangs, kill `argosy: agent` of `ps x`: the next one takes over, and the ranks continue"
        raise DeadlinePassed(error.what, error.seconds, hint=hint) from None
    if isinstance(answer, Refused):
        raise ConfigError(answer.reason, hint=answer.hint)
    return answer


def _wait_for_answer(link: Link[ToClient], timeout_s: float) -> ToClient:
    """Wait for an answer, and say so if that takes long."""
    if timeout_s > SILENCE_S:
        with contextlib.suppress(DeadlinePassed):
            return link.wait(SILENCE_S)[0]
        left = f"waiting up to {timeout_s - SILENCE_S:.0f} s more"
        print(f"argosy: the agent has not answered for {SILENCE_S:.0f} s; {left}", file=sys.stderr, flush=True)
        timeout_s -= SILENCE_S
    return link.wait(timeout_s)[0]


def submit(launch: Launch, fds: Sequence[int], hosts: Sequence[str] = ()) -> tuple[Link[ToClient], Welcome]:
    """Start a run. If the agent, or the last launch in the directory, is just ending, wait for that.

    `fds` are the sealed environment and, if the run has one, standard input. `hosts` are those that its engine gives.
    """
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.ExitStack() as unless_welcome:
            link = reach_agent()
            unless_welcome.callback(link.close)
            try:
                link.send(LaunchRun(launch, len(fds) > 1, list(hosts)), fds)
                answer = _wait_for_answer(link, ANSWER_S)
            except PeerLost:
                if time.monotonic() > deadline:
                    raise
            else:
                if isinstance(answer, Welcome):
                    unless_welcome.pop_all()
                    return link, answer
                assert isinstance(answer, Refused)
                if not answer.later or time.monotonic() > deadline:
                    raise ConfigError(answer.reason, hint=answer.hint)
        time.sleep(0.05)


def rejoin(welcome: Welcome, give_up: Callable[[], bool] = lambda: False) -> Link[ToClient] | None:
    """The agent is gone: watch the run through the next one; None if it ended, or no agent came."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and not give_up():
        with contextlib.ExitStack() as unless_welcome, contextlib.suppress(ArgosyError):
            link = reach_agent(start_after_s=1.0)  # The warden, if it lives, is faster than that.
            unless_welcome.callback(link.close)
            link.send(WatchRun(welcome.run, lease=True))
            answer, _ = link.wait(5.0)
            if not isinstance(answer, Welcome):
                return None
            unless_welcome.pop_all()
            return link
        time.sleep(0.02)
    return None


def end_daemons(by: str, timeout_s: float, runtime: Path | None = None, *, lost: bool = False) -> None:
    """Let the daemons stop all runs and end, and wait for that; those of this user are started if there are none.

    Raises:
        PeerLost: they are being killed; what they left is there for the next ones to remove.
        DeadlinePassed: they have not ended.
    """
    agent = reach_agent() if runtime is None else connect_agent(runtime)
    warden = connect((runtime or runtime_dir()) / "warden.sock", to_client, "the warden")
    try:
        ask(agent, Shutdown(by, lost))
        with contextlib.suppress(PeerLost):
            warden.wait(timeout_s)  # It says nothing, and closes the link when it ends.
    finally:
        agent.close()
        warden.close()


def list_runs(*, everywhere: bool = False) -> Runs:
    """What is alive on this host; between two agents the runs whose ranks live, and no daemons.

    `everywhere` adds the runs of the index that are alive under another runtime directory.

    Raises:
        ConfigError: the runtime directory is somebody else's.
    """
    alive = _ask_runs(runtime_dir())
    if everywhere:
        known = {run.directory for run in alive.runs}
        others = [directory for _, directory in indexed_runs() if str(directory) not in known]
        alive.runs.extend(run for directory in others if (run := _run_elsewhere(directory)) is not None)
    return alive


def _ask_runs(runtime: Path, timeout_s: float = ANSWER_S) -> Runs:
    with contextlib.suppress(PeerLost):
        link = connect_agent(runtime)
        try:
            answer = ask(link, ListRuns(), timeout_s=timeout_s)
        finally:
            link.close()
        assert isinstance(answer, Runs)
        return answer
    return Runs(runs_between(runtime), [])


def _run_elsewhere(directory: Path) -> RunInfo | None:
    """The run as the agent of another runtime directory knows it; None if there is none."""
    owner = read_owner(directory)
    if owner is None or owner.host != os.uname().nodename or not is_elsewhere(owner, runtime_dir()):
        return None
    try:
        there = _ask_runs(Path(owner.runtime), timeout_s=5.0).runs
        found = next((run for run in there if run.run == owner.run), None)
    except ArgosyError:  # It does not answer, or is of another version.
        record = read_record(directory)
        ranks = [RankInfo(index, 0, 0, "unknown") for index in range(record.size)]
        found = RunInfo(owner.run, record.name, str(directory), "unknown", record.size, record.started_at, False, ranks)
    return found and msgspec.structs.replace(found, state=f"{found.state} under {owner.runtime}")


def find_living(text: str) -> RunInfo:
    """The living run that `text` names: see `find_run`.

    Raises:
        ConfigError: there is no such run, it has ended, or it is not under this runtime directory.
    """
    living = list_runs().runs
    try:
        directory = find_run(text)
    except ConfigError:  # Its directory may be gone.
        if len(named := [run for run in living if run.name == text]) == 1:
            return named[0]
        raise
    for run in living:
        if run.directory == str(directory):
            return run
    name, owner = read_record(directory).name, read_owner(directory)
    if owner is not None and is_elsewhere(owner, runtime_dir()):
        raise ConfigError(
            f"the run belongs to {owner.runtime} on {owner.host}: {name}",
            hint=f"`{owner.command('ps', runtime_dir())}` shows it",
        )
    raise ConfigError(
        f"the run has ended: {name}", hint=f"`argosy why {name}` tells how, `argosy ps` lists the living runs"
    )
