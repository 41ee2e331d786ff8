"""The end of a loop of steps, and processes that come when it is over.

E1  All ranks leave after the same step, which is durable.
E2  A rank that is replaced when its loop is over takes the last state from the checkpoint, and waits for nobody. What
    it then asks of other ranks is answered if all of them have been replaced, too. Else it is refused: never does it
    take its own values for everybody's.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from argosy.checkpoint import alone

if TYPE_CHECKING:
    from argosy.train.run import Run

AGAIN_S = 0.5
"""How long a last checkpoint that failed waits before it is tried again."""


class _Finished(msgspec.Struct):
    """At which step a run that was to continue until `until` has ended."""

    step: int
    until: int | None


def leave(run: "Run", until: int | None, *, reached: bool) -> bool:
    """The last step: all ranks have it, and it is durable. False if one was lost meanwhile, or it is not."""
    with run.crew.latched() or nullcontext() as latch:
        words = run.crew.ask(run.saves.words(), latch)
    if words is not None:
        run.saves.compare(run, words)
    durable = words is not None and run.saves.finish(run)
    with run.crew.latched() or nullcontext() as latch:
        together = run.crew.ask([int(durable)], latch)
    if together is None or not together[0]:
        run.saves.forget()
        time.sleep(0.0 if together is None else AGAIN_S)
        return False
    if run.crew.board is not None:
        run.crew.board.set(_ended(run), str(run.step))
    run.scribe.write([])
    if run.rank == 0 and reached:
        _mark_finished(run.directory, run.step, until)
    run.say(f"finished after step {run.step:,}" if reached else run.wish.outcome(run.step))
    run.wish.leave(reached)
    return True


def is_over(run: "Run", until: int | None) -> bool:
    """Whether no step is left in this loop. The state is then that of its last step, or of a later loop's."""
    crew, done = run.crew, _finished_at(run.directory, until)
    if crew.generation and crew.board is not None and crew.board.check([_ended(run)]):
        done = int(crew.board.get(_ended(run)))
    if done is not None and not crew.joined:
        (_come_late if crew.generation else _come_again)(run)
    if done is None or run.step < done:
        crew.meet_when_needed(False)
        if crew.board is not None:
            crew.board.set(_begun(run), "")
        return False
    run.say(f"{run.directory} finished at step {done:,}: nothing to do")
    return True


def _come_again(run: "Run") -> None:
    """Another launch, with all ranks: what follows the loop finds the state of its end."""
    if run.crew.kind == "replaceable":
        run.crew.meet(lambda: False)
    run.healing.find_holders()
    run.healing.from_disk(quiet=True)


def _come_late(run: "Run") -> None:
    """A replaced rank: nobody waits for it here (E2)."""
    with alone():
        run.healing.find_holders()
        run.healing.from_disk(quiet=True)
    run.healing.take_local(run.step)
    if not run.crew.board.check([_begun(run, 1)]):  # Else the others are in the next loop, and meet this rank there.
        run.crew.meet_when_needed(True)


def _ended(run: "Run") -> str:
    """Where ranks of this launch note that the loop has ended."""
    return f"argosy/ended/{run.leaving.loop}"


def _begun(run: "Run", later: int = 0) -> str:
    """Where ranks of this launch note that the loop has begun."""
    return f"argosy/begun/{run.leaving.loop + later}"


def _mark_finished(directory: Path, step: int, until: int | None) -> None:
    path = directory / "finished.json"
    path.with_suffix(".new").write_bytes(msgspec.json.encode(_Finished(step, until)))
    path.with_suffix(".new").replace(path)


def _finished_at(directory: Path, until: int | None) -> int | None:
    """The step at which a run that was to continue until `until` has ended, if it has."""
    try:
        found = msgspec.json.decode((directory / "finished.json").read_bytes(), type=_Finished)
    except (OSError, msgspec.MsgspecError):
        return None
    return found.step if found.until == until or (until is not None and found.step >= until) else None
