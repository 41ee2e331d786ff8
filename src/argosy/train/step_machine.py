"""Decide what one attempt at a step does next. Pure: `step.py` performs the effects.

M1  Before the vote nothing that matters has changed, or it was copied first (`undo`): an attempt can be rolled back.
    Otherwise, as when a scaler lets no optimizer step and an average is updated, a lost attempt is torn.
M2  If all ranks vote to apply, all who voted apply. If one is lost before, none does, and the step is attempted again.
M3  After the vote a rank either finishes its block or is torn: its state belongs to no step, and it commits nothing.
M4  A loss explains every `Exception` of its attempt before the vote; others are the user's.
"""

from enum import Enum

import msgspec


class Outcome(Enum):
    """What became of an attempt."""

    OPEN = "not decided"
    COMPARED = "computed once, to be compared with the second time"
    APPLIED = "all ranks apply it"
    REJECTED = "all ranks skip it: a number is not finite, or the loss a spike"
    LOST = "a rank was lost before the vote"
    TORN = "it failed after the vote: the state of this rank belongs to no step"
    FAILED = "it raised an exception of the script"


class Effect(Enum):
    """What the shell must do, in order."""

    VOTE = "ask all ranks, then react to `Voted`"
    HOLD = "from now on a lost peer raises"
    ABANDON = "leave the block"
    ASK = "find out whether a rank is lost, then react to `Asked`"
    ROLL_BACK = "make the state what it was when the block began"
    COMMIT = "the step counts"
    REPORT_LOSS = "meet the other ranks again"
    FAIL = "the exception ends this process"


class Left(Enum):
    """How the block of an attempt ended."""

    DONE = "at its end"
    ABANDONED = "because the attempt does not count"
    EXCEPTION = "by an exception that a lost rank may explain"
    MISTAKE = "by one that nothing else explains"


class Updating(msgspec.Struct, frozen=True):
    """An optimizer is about to change parameters."""

    issued: int
    """Operations between ranks that the attempt has begun so far."""
    finite: bool = True
    """Whether all gradients that any optimizer of the run will use are finite."""
    renewed: bool = False
    """Whether this optimizer's gradients were made after the first update."""
    changed: bool = False
    """Whether parameters have changed since the block began."""


class Compared(msgspec.Struct, frozen=True):
    """The gradients of the first computation are kept; the second one will be compared with them."""


class Voted(msgspec.Struct, frozen=True):
    """The answer of all ranks: to apply, to skip, or None if a rank is lost."""

    applies: bool | None


class Leaving(msgspec.Struct, frozen=True):
    """The block has ended."""

    how: Left
    issued: int = 0
    lost: bool = False
    torn: bool = False
    """An operation after the vote has failed."""
    changed: bool = False


class Asked(msgspec.Struct, frozen=True):
    """Whether a rank is lost, which explains an exception."""

    lost: bool


Event = Updating | Compared | Voted | Leaving | Asked


class Attempt(msgspec.Struct, frozen=True):
    """One attempt at a step, as one rank sees it."""

    undo: bool
    """All state was copied when the block began: the vote is at its end."""
    rehearsal: bool = False
    outcome: Outcome = Outcome.OPEN
    updates: int = 0
    finite: bool = True
    issued: int = -1
    """Operations begun before the first update."""
    late: bool = False
    """Ranks communicated, or gradients were made, after the first update: later steps need `undo`."""
    changed: bool = False
    """Parameters changed before the vote: without `undo` a lost attempt cannot be rolled back."""
    ended: bool = False

    @property
    def committed(self) -> bool:
        """Whether the step counts."""
        return self.outcome in (Outcome.APPLIED, Outcome.REJECTED)


Reaction = tuple[Attempt, list[Effect]]


def react(attempt: Attempt, event: Event) -> Reaction:
    """Decide what follows from `event`; performs nothing."""
    match event:
        case Updating():
            return _update(attempt, event)
        case Compared():
            return _become(attempt, Outcome.COMPARED, Effect.ABANDON)
        case Voted(applies):
            outcome = Outcome.LOST if applies is None else Outcome.APPLIED if applies else Outcome.REJECTED
            attempt = msgspec.structs.replace(attempt, outcome=outcome)
            if attempt.ended:
                return _end(attempt, Leaving(Left.DONE))
            return attempt, [Effect.HOLD if outcome is Outcome.APPLIED else Effect.ABANDON]
        case Leaving(issued=issued):
            late = attempt.late or 0 <= attempt.issued < issued
            changed = attempt.changed or (event.changed and attempt.outcome is not Outcome.APPLIED)
            return _end(msgspec.structs.replace(attempt, late=late, changed=changed, ended=True), event)
        case Asked(lost):
            return _lost(attempt) if lost else _become(attempt, Outcome.FAILED, Effect.ROLL_BACK, Effect.FAIL)


def _update(attempt: Attempt, event: Updating) -> Reaction:
    first = attempt.updates == 0
    attempt = msgspec.structs.replace(
        attempt,
        updates=attempt.updates + 1,
        issued=event.issued if first else attempt.issued,
        finite=attempt.finite and event.finite,
        late=attempt.late or (event.changed if first else event.renewed),
        changed=attempt.changed or (event.changed and first),
    )
    if attempt.rehearsal or (attempt.undo and attempt.outcome is Outcome.OPEN):
        return attempt, []
    if attempt.outcome is Outcome.OPEN:
        return attempt, [Effect.VOTE]
    if attempt.outcome is Outcome.APPLIED:  # A later optimizer of the step.
        return (attempt, []) if event.finite else _become(attempt, Outcome.TORN, Effect.ABANDON)
    return attempt, [Effect.ABANDON]


def _end(attempt: Attempt, event: Leaving) -> Reaction:
    if attempt.rehearsal:
        return attempt, [Effect.ROLL_BACK, *([] if event.how in (Left.DONE, Left.ABANDONED) else [Effect.FAIL])]
    match attempt.outcome:
        case Outcome.OPEN if event.how is Left.DONE:
            return attempt, [Effect.VOTE]
        case Outcome.APPLIED if event.torn:
            return _become(attempt, Outcome.TORN, Effect.REPORT_LOSS)
        case Outcome.APPLIED if event.how is Left.DONE:
            return attempt, [Effect.COMMIT]
        case Outcome.APPLIED:
            return _become(attempt, Outcome.FAILED, Effect.FAIL)
        case Outcome.REJECTED if event.how in (Left.DONE, Left.ABANDONED):
            return attempt, [Effect.ROLL_BACK, Effect.COMMIT]
        case Outcome.TORN:
            return attempt, [Effect.REPORT_LOSS]
        case Outcome.COMPARED if event.how is Left.ABANDONED:
            return attempt, [Effect.ROLL_BACK]
        case Outcome.LOST:
            return _lost(attempt)
        case _ if event.how is Left.EXCEPTION or event.how is Left.ABANDONED:
            return _lost(attempt) if event.lost else (attempt, [Effect.ASK])
        case _:
            return _become(attempt, Outcome.FAILED, Effect.ROLL_BACK, Effect.FAIL)


def _lost(attempt: Attempt) -> Reaction:
    if attempt.changed and not attempt.undo:  # M1 does not hold.
        return _become(attempt, Outcome.TORN, Effect.REPORT_LOSS)
    return _become(attempt, Outcome.LOST, Effect.ROLL_BACK, Effect.REPORT_LOSS)


def _become(attempt: Attempt, outcome: Outcome, *effects: Effect) -> Reaction:
    return msgspec.structs.replace(attempt, outcome=outcome), list(effects)
