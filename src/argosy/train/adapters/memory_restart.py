"""Restart all ranks from memory when one is lost, where a step cannot be repeated.

Each rank keeps all of its state, after each step, in memory that outlives it.
"""

from argosy.train.run import Run


def restart_together(run: Run, why: str) -> None:
    """From now on a lost rank restarts all ranks."""
    if run.healing.restarts_together or run.crew.kind != "replaceable":
        return
    run.healing.restarts_together = run.healing.late = True
    if run.crew.joined:
        run.healing.put_full()
    run.say(f"{why}: if a rank is lost, all ranks restart and resume from the last step, which is kept in memory")
