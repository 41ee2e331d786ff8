"""Save a step of all ranks from one process, because some of the others are gone."""

import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from argosy.checkpoint.arena import Arena
from argosy.checkpoint.commit_step import Committer
from argosy.checkpoint.format import step_name
from argosy.checkpoint.jobs import Handle, Job, warn
from argosy.checkpoint.saver import draft_of
from argosy.checkpoint.snapshot import Snapshot
from argosy.checkpoint.stores import located, open_store
from argosy.checkpoint.write_plan import Arrangement, Habits
from argosy.transfer import State


def save_whole(
    path: str | Path, states: Iterable[State], step: int, *, era: int = 0, say: Callable[[str], None] = warn
) -> None:
    """Commit `step` from the state of every rank; it is durable on return.

    `states` come in any order, but rank 0's comes last: with it the step is committed. No saver of another run may
    write to `path`; savers of this run may.

    Raises:
        OSError: the disk refused again and again; nothing is committed.
    """
    store, name = open_store(located(path), new=True), step_name(step, f"{secrets.token_hex(4)}0001", era)
    for state in states:
        arranged = Arrangement(state)
        draft = draft_of(state, arranged, step, name)
        job, arena = Job(draft, Handle(step), Habits(), say), Arena(draft.bytes)
        job.snapshot = Snapshot(arranged, state, arena, done=job.copied)
        committer = Committer(store, state.rank, state.size, (), say)
        (committer.write_part if state.rank else committer.commit)(draft, arena.view, job)
        arena.close()
