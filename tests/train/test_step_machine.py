"""The step machine and the healing decision, explored: every order of events of a small run, with every kill."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from argosy.train.heal_decision import FromArenas, FromPeer, Told, Version, decide_healing
from argosy.train.step_machine import Attempt, Effect, Leaving, Left, Outcome, Updating, Voted, react

REACT, DECIDE = react, decide_healing
Content = tuple[Any, ...]
"""What a state is made of: the attempts that it has gone through. Another attempt is other content."""


class Setup(NamedTuple):
    """A small run."""

    ranks: int
    kills: int
    steps: int = 2
    late: int = -1
    """The step that communicates after its first update."""
    replicated: bool = True
    doubt: bool = False
    """Whether a vote that all have reached may still fail on some ranks, as with Gloo."""


class Rank(NamedTuple):
    """One rank, between two things that others can see."""

    at: str = "meet"
    content: Content = ()
    version: Version = Version()
    fresh: bool = True
    torn: bool = False
    undo: bool = False
    held: tuple[tuple[Version, Content], ...] = ()
    attempt: Attempt | None = None
    made: Content = ()
    lost: bool = False


class World(NamedTuple):
    """All ranks, the view in which they are, and who has reached which operation in it."""

    ranks: tuple[Rank, ...]
    view: int
    broken: bool
    arrived: frozenset[tuple[str, int, int]]
    kills: int


def explore(setup: Setup) -> int:
    """Follow every order of events; returns how many states there are."""
    first = World((Rank(),) * setup.ranks, 1, False, frozenset(), setup.kills)
    seen, waiting, ended = {first}, [first], 0
    while waiting:
        world = waiting.pop()
        check(setup, world)
        after = list(follow(setup, world))
        if all(rank.at == "end" for rank in world.ranks):
            ended += 1
        else:
            assert after, f"nothing can happen any more: {world}"
        fresh = [each for each in after if each not in seen]
        seen.update(fresh)
        waiting += fresh
    assert ended
    return len(seen)


def check(setup: Setup, world: World) -> None:
    """What holds in every state."""
    whole = [rank for rank in world.ranks if not rank.fresh and not rank.torn]
    for rank in whole:
        for other in whole:  # No two ranks commit different effects of an attempt.
            assert rank.version != other.version or rank.content == other.content, world
        for step, (number, _, *late) in enumerate(rank.content):  # Each step counts once, with all that belongs to it.
            assert step == number, world
            assert late == (["late"] if step == setup.late else []), world
    if all(rank.at == "end" for rank in world.ranks):
        assert len({rank.content for rank in world.ranks}) == 1, world
        assert len(world.ranks[0].content) == setup.steps


def follow(setup: Setup, world: World) -> Iterator[World]:
    """What can happen next."""
    over = all(("leave", setup.steps, index) in world.arrived for index in range(setup.ranks))
    for index, rank in enumerate(world.ranks):
        if world.kills and not over and not (rank.at == "meet" and rank.fresh):
            gone = Rank(held=rank.held)
            yield change(world, index, gone)._replace(broken=True, kills=world.kills - 1)
        if rank.at not in ("meet", "end"):
            yield from advance(setup, world, index)
    if all(rank.at == "meet" for rank in world.ranks):
        yield from meet(setup, world)


def advance(setup: Setup, world: World, index: int) -> Iterator[World]:
    """What one rank does next."""
    rank = world.ranks[index]
    step = len(rank.content)
    if rank.at == "heal":
        yield change(world, index, rank._replace(at="idle"))
    elif rank.at == "put":
        base = [each for each in rank.held if each[0] != rank.version][-1:]
        kept = [each for each in rank.held if each[0] == rank.made] or base
        held = (*kept, (rank.version, rank.content))
        yield change(world, index, rank._replace(at="idle", held=held, made=()))
    elif rank.at == "idle":
        if world.broken:
            yield change(world, index, rank._replace(at="meet"))
        attempt = Attempt(undo=rank.undo)
        at = "leave" if step == setup.steps else "reduce"
        entered = rank._replace(at=at, attempt=attempt, made=(), lost=False)
        yield arrive(change(world, index, entered), index, step)
    else:
        everyone = all((rank.at, step, each) in world.arrived for each in range(setup.ranks))
        atomic = rank.at == "leave" or (rank.at == "vote" and not setup.doubt)
        if everyone and not rank.lost:
            yield from succeed(setup, world, index)
        if (world.broken and not (everyone and atomic)) or rank.lost:
            yield from fail(setup, world, index)


def succeed(setup: Setup, world: World, index: int) -> Iterator[World]:
    """The operation in which a rank waits has all its members."""
    rank = world.ranks[index]
    if rank.at == "leave":
        yield change(world, index, rank._replace(at="end"))
    elif rank.at == "reduce":
        yield update(setup, world, index, rank)
    elif rank.at == "vote":
        yield voted(setup, world, index, True)
    else:
        made = (*rank.made, "late")
        yield leave(world, index, rank._replace(made=made), Left.DONE)


def fail(setup: Setup, world: World, index: int) -> Iterator[World]:
    """The operation in which a rank waits meets a loss."""
    rank = world.ranks[index]._replace(lost=True)
    if rank.at == "leave":
        yield change(world, index, rank._replace(at="meet"))
    elif rank.at == "reduce":
        yield update(setup, world, index, rank)
    elif rank.at == "vote":
        yield voted(setup, change(world, index, rank), index, None)
    else:
        torn = rank.attempt is not None and rank.attempt.outcome is Outcome.APPLIED
        for how in (Left.DONE, Left.EXCEPTION):  # Of an asynchronous collective, and of a synchronous one.
            yield leave(world, index, rank._replace(made=(*rank.made, "wrong")), how, torn=torn)


def update(setup: Setup, world: World, index: int, rank: Rank) -> World:
    assert rank.attempt is not None
    attempt, effects = react(rank.attempt, Updating(1))
    rank = rank._replace(attempt=attempt, made=(len(rank.content), world.view))
    if effects == [Effect.VOTE]:
        return arrive(change(world, index, rank._replace(at="vote")), index, len(rank.content))
    return after_update(setup, world, index, rank)


def after_update(setup: Setup, world: World, index: int, rank: Rank) -> World:
    if len(rank.content) == setup.late:
        return arrive(change(world, index, rank._replace(at="late")), index, len(rank.content))
    return leave(world, index, rank, Left.DONE)


def voted(setup: Setup, world: World, index: int, applies: bool | None) -> World:
    rank = world.ranks[index]
    assert rank.attempt is not None
    attempt, effects = react(rank.attempt, Voted(applies))
    rank = rank._replace(attempt=attempt)
    if effects == [Effect.HOLD]:
        return after_update(setup, world, index, rank)
    if effects == [Effect.ABANDON]:
        return leave(world, index, rank, Left.ABANDONED)
    return perform(world, index, rank, effects)


def leave(world: World, index: int, rank: Rank, how: Left, *, torn: bool = False) -> World:
    assert rank.attempt is not None
    issued = 1 + ("late" in rank.made or "wrong" in rank.made)
    attempt, effects = react(rank.attempt, Leaving(how, issued, rank.lost, torn))
    rank = rank._replace(attempt=attempt)
    if effects == [Effect.VOTE]:
        return arrive(change(world, index, rank._replace(at="vote")), index, len(rank.content))
    return perform(world, index, rank, effects)


def perform(world: World, index: int, rank: Rank, effects: list[Effect]) -> World:
    assert rank.attempt is not None
    assert Effect.FAIL not in effects
    if effects == [Effect.COMMIT]:
        content = (*rank.content, rank.made)
        version = Version(len(content), world.view)
        undo = rank.undo or rank.attempt.late
        base: Any = rank.version
        rank = rank._replace(at="put", content=content, version=version, undo=undo, attempt=None, made=base)
        return change(world, index, rank)
    assert effects[-1] is Effect.REPORT_LOSS
    torn = rank.attempt.outcome is Outcome.TORN
    return change(world, index, rank._replace(at="meet", torn=torn, attempt=None, made=(), lost=False))


def meet(setup: Setup, world: World) -> Iterator[World]:
    """All ranks meet in a new view; a kill may still come before each has taken the state over."""
    ranks, view = world.ranks, world.view + 1
    held = [[] if setup.replicated else [version for version, _ in rank.held] for rank in ranks]
    told = [
        Told(rank.fresh, rank.version, setup.replicated, rank.torn, held[number], rank.undo, rank.undo or rank.torn)
        for number, rank in enumerate(ranks)
    ]
    undo = any(each.late for each in told)
    healed: list[Rank] = []
    decision: Any = decide_healing(told)
    for number, rank in enumerate(ranks):
        match decision:
            case FromPeer(source, version, to):
                takes = rank.fresh or number in to
                content, version = (ranks[source].content, version) if takes else (rank.content, rank.version)
            case FromArenas(version):
                found = dict(rank.held) | ({} if rank.fresh or rank.torn else {rank.version: rank.content})
                content = found[version]
            case Steps(step):
                version, content = next(each for each in reversed(rank.held) if each[0].step == step)
            case _:  # There is no checkpoint: the beginning.
                content, version = (), Version(0, view)
        kept = rank.held if not isinstance(decision, FromPeer) else ()
        healed.append(Rank("heal", content, version, False, False, undo, kept))
    yield World(tuple(healed), view, False, frozenset(), world.kills)
    for index, rank in enumerate(ranks):  # One has not taken it over when another is lost, and they meet again.
        if world.kills:
            half = [each if number != index else rank for number, each in enumerate(healed)]
            for victim in range(len(ranks)):
                if victim != index:
                    left = [each._replace(at="meet") for each in half]
                    left[victim] = Rank(held=half[victim].held)
                    yield World(tuple(left), view, True, frozenset(), world.kills - 1)


def change(world: World, index: int, rank: Rank) -> World:
    return world._replace(ranks=(*world.ranks[:index], rank, *world.ranks[index + 1 :]))


def arrive(world: World, index: int, step: int) -> World:
    if world.broken:  # An operation that not all had reached when a rank was lost is never complete.
        return world
    return world._replace(arrived=world.arrived | {(world.ranks[index].at, step, index)})


@pytest.mark.parametrize("doubt", [False, True], ids=["atomic votes", "votes in doubt"])
@pytest.mark.parametrize("replicated", [True, False], ids=["replicas", "shards"])
@pytest.mark.parametrize("late", [-1, 1], ids=["", "late"])
@pytest.mark.parametrize(("ranks", "kills", "steps"), [(2, 2, 3), pytest.param(3, 2, 2, marks=pytest.mark.system)])
def test_every_order_of_events(ranks: int, kills: int, steps: int, late: int, replicated: bool, doubt: bool):
    assert explore(Setup(ranks, kills, steps, late, replicated, doubt)) > 1000


def commits_what_is_torn(attempt: Attempt, event: Any) -> Any:
    return REACT(attempt, msgspec.structs.replace(event, torn=False) if isinstance(event, Leaving) else event)


def forgets_attempts(told: list[Told]) -> Any:
    """Take versions of the same step for the same."""
    bare = [
        msgspec.structs.replace(each, held=[Version(v.step) for v in each.held], version=Version(each.version.step))
        for each in told
    ]
    found = DECIDE(bare)
    if not isinstance(found, FromArenas):
        return DECIDE(told)
    return Steps(found.version.step)


class Steps(NamedTuple):
    """Whatever version of a step each rank has."""

    step: int


def forgets_doubt(told: list[Told]) -> Any:
    """Send the state of the first living rank to those that are fresh, and leave the others as they are."""
    alive = [rank for rank, each in enumerate(told) if not each.fresh]
    return FromPeer(alive[0], told[alive[0]].version, ()) if alive and not told[0].torn else DECIDE(told)


@pytest.mark.parametrize(
    ("name", "wrong", "setup"),
    [
        ("react", commits_what_is_torn, Setup(2, 1, 2, late=1)),
        ("decide_healing", forgets_attempts, Setup(2, 2, 3, replicated=False)),
        ("decide_healing", forgets_doubt, Setup(3, 1, 2, doubt=True)),
    ],
)
def test_the_exploration_finds_each_fault(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any, setup: Setup):
    monkeypatch.setitem(globals(), name, wrong)
    with pytest.raises(AssertionError):
        explore(setup)
