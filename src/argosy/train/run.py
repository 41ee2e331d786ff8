"""A run: the step loop of a training that survives what happens to it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_pre_hook

from argosy.checkpoint import KeepBack, KeepLast
from argosy.collective import CollectiveMismatch, Superseded
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.data import Loader, Queue, seed_generators
from argosy.fabric import here
from argosy.observe import Flag, take_over_steps
from argosy.supervise import record_standalone
from argosy.train.arena import Arena, arena_folders
from argosy.train.arguments import check_count, check_directory, check_name, check_run, check_whole, parse_parent
from argosy.train.checkpoint_schedule import Keep, Saves
from argosy.train.gradients import has_gradients
from argosy.train.heal import Healing
from argosy.train.leaving import Leaving, caller, site_of
from argosy.train.ledger import Ledger, bits_differences, bits_record
from argosy.train.loop_body import run_body
from argosy.train.loop_end import is_over, leave
from argosy.train.membership import Crew, NobodyCame
from argosy.train.once import Once
from argosy.train.parallel import Parallel
from argosy.train.recheck import Recheck
from argosy.train.rewinding import Back, Rewinding
from argosy.train.rows import HIGHEST, Best, Row, at_call, numbers
from argosy.train.scribe import Scribe
from argosy.train.signals import Wish, Wishes
from argosy.train.spikes import Spike, from_word, to_word
from argosy.train.stall_checks import Fruitless
from argosy.train.step import Diverged, Step
from argosy.train.survivor_save import in_words, save_without_lost
from argosy.train.tracking import Tracked

FAILED_MAX = 3
REHEARSALS = 3
APART = "changes buffers after its update, on each rank in another way"
LATE = "communicates or makes gradients after its first update, or changes parameters before"


class Run:
    """The state of a training and its loop, through failures, in a directory.

    Alone, under torchrun, or under `argosy run`, where a lost rank is replaced while the others wait. If the directory
    holds a run, the run resumes.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        seed: int = 0,
        save_every: int = 500,
        save_every_s: float = 600.0,
        keep: Sequence[Keep] | None = None,
        parent: str | Path | None = None,
        recheck: int | None = None,
        spike: Spike | None = None,
        patience_s: float = 600.0,
    ) -> None:
        check_run(save_every, save_every_s, keep, spike)
        self.crew = Crew(patience_s)
        self.rank, self.size, self.seed = self.crew.rank, self.crew.size, seed
        self.directory = Path(directory or here().directory or Path("runs") / (Path(sys.argv[0]).stem or "run"))
        self.step = 0
        """Steps that count."""
        self.tracked, self.ledger = Tracked(), Ledger(bits_record(self.size, seed))
        self.tracked.others["run"] = self.ledger
        self.current: Step | None = None
        self.undo = True
        """Whether all state is copied before each step. True until the first steps show that it is not needed."""
        self.wish = Wishes()
        back = [KeepBack(spike.back)] if spike is not None and spike.then == "rewind" else []
        self.saves = Saves(
            self.directory, save_every, save_every_s, [*([KeepLast(3)] if keep is None else keep), *back]
        )
        self.arena = Arena(arena_folders(), self.rank, self.tell) if self.crew.kind == "replaceable" else None
        self.once = Once(arena_folders() if self.arena else [], self.rank)
        self.healing = Healing(self)
        self.leaving = Leaving(self)
        self.fruitless = Fruitless(self)
        self.parent = parse_parent(parent)
        self.recheck = Recheck(recheck)
        self.rewinding = Rewinding(self)
        self.spike = spike
        self.parallel = Parallel()
        self.scribe = Scribe(self)
        self._until: int | None = None
        self._lost_at: tuple[float, str] | None = None
        self._broken = ""
        """Why no step can follow."""
        self._rehearsing = self._settles = False
        self.used = False
        """This process has computed a step, or rehearsed one, up to its update."""
        seed_generators(seed, "begin")  # Constructors that draw random numbers draw the same on all ranks.
        if self.rank == 0:
            check_directory(self.directory)
        if here().launcher != "argosy":
            record_standalone(self.directory, self.rank, self.size, self.crew.gather)
        self.page = take_over_steps() if self.crew.kind != "foreign" else None
        if self.crew.kind == "foreign":
            self.say(
                "not under `argosy run`: a lost rank is not replaced; the next launch resumes from the last checkpoint"
            )

    # -- what a script says ------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """Counters of the user's own: what JSON can say. Rolled back and saved with everything else."""
        return self.ledger.state

    def track(self, **things: Any) -> None:
        """Take care of modules, optimizers, schedules, scalers, averages: whatever has a state_dict.

        LBFGS is refused: it evaluates the model several times in one step. On several ranks every trained parameter
        is a DTensor, or in DDP or `replicate`, or named here, as a module, a parameter or a pattern of names:
        `own=[...]` are those that each rank trains for itself, `replicated=[...]` those that the script keeps alike.

        Raises:
            ConfigError: something is tracked twice, or has no state_dict.
        """
        with self._hopeless():
            for name, thing in things.items():
                if name in ("own", "replicated"):
                    self.tracked.declared.add(name, thing)
                    continue
                if name == "run" or "/" in name:
                    raise ConfigError(f"run.track cannot use this name: {name!r}")
                self.tracked.add(name, thing)

    def log(self, **values: Any) -> None:
        """Note numbers: inside a step they count if it does, outside at once.

        Raises:
            ConfigError: a value is no number.
        """
        logged = {name: at_call(name, value) for name, value in values.items()}
        if self.current is not None:
            self.current.rows.update(logged)
        else:
            self.scribe.note(Row(self.step, time.time(), numbers(logged)), self._until)

    def best(self, name: str, *, highest: bool = False) -> Best:
        """The lowest value logged under a name (the highest with `highest`), its step and its age."""
        check_name("run.best", name)
        return copy(self.ledger.bests.get(name + (HIGHEST if highest else ""), Best()))

    def stop(self, reason: str = "") -> None:
        """End the loop on all ranks after the next step that counts."""
        if self.rank and reason:
            self.tell(f"rank {self.rank} asks to stop: {reason}")
        self.wish.ask(Wish.STOP, reason)

    def save(self, tag: str | None = None) -> None:
        """Begin a checkpoint of the last step; all ranks do. A tagged one is kept.

        Raises:
            ConfigError: inside a step, or outside the loop.
        """
        if self.current is not None:
            raise ConfigError(f"step {self.current.number} is still open", hint="save after the block")
        if self._rehearsing:
            return
        self.saves.ask(caller())
        self.saves.save(self, tag)

    def rewind(self, to: int, *, skip: int | None = None, reason: str = "") -> None:
        """Go back to the newest checkpoint at or before step `to`, on all ranks, after the next step that counts.

        `skip` global batches are left out there: by default all that were used since. Any rank may ask; checkpoints
        of later steps are not gone on with any more.
        """
        self.rewinding.ask(Back(to, skip, reason))

    @contextmanager
    def aside(self, name: str) -> Generator[None]:
        """Something beside the steps, such as an evaluation: given up, and said, if a rank is lost meanwhile."""
        modules = [module for root in self.tracked.modules.values() for module in root.modules()]
        modes = [module.training for module in modules]
        try:
            yield
        except Exception as error:
            if not isinstance(error, PeerLost) and not self.crew.is_lost(0.5):
                self.failed(self.step, error, whole=True)
                raise
            self.say(f"abandoned {name} after step {self.step}: {in_words(error)}")
            self._lost_at = self._lost_at or (time.monotonic(), in_words(error))
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def steps(self, until: int | None = None) -> Iterator[Step]:
        """The steps that are left until `until` count, or the data are used up; one that did not count comes again."""
        self._until = until
        with self._hopeless():
            check_count("until", until or 0, 0)
            self.tracked.check_optimizers()
            self.parallel.find(self.tracked.modules.values())
            self.leaving.loop += 1
            if is_over(self, until):
                return
            if self.crew.kind == "replaceable" and not self.crew.joined:
                self.parallel.build_buckets()
            self.wish.listen()
            watching, hurry = register_optimizer_step_pre_hook(self._before_update), True
            self.leaving.watch()
            try:
                yield from self._steps()
                hurry = False
            except GeneratorExit:
                self.leaving.broke(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
                raise
            finally:
                self.leaving.end()
                watching.remove()
                self.wish.restore()
                self.saves.close(hurry=hurry)

    def loop(self, numbers: range, **things: Any) -> Callable[[Callable[[int], Any]], None]:
        """Decorate a function of a step's number, the body of a loop: it runs at once, and `things` are tracked."""
        return partial(run_body, self, numbers, things)

    def end_here(self) -> None:
        """The last step was the last of all: `steps` ends once all ranks have it."""
        self._until = self.step

    def _steps(self) -> Iterator[Step]:
        rehearsed = 0
        while True:
            check_whole(self._broken)
            if not self.crew.joined or self.crew.is_lost():
                if self.crew.joined and self._lost_at is None:
                    self.lost(self.step, self.crew.group.loss)
                if self._must_rehearse(rehearsed):
                    rehearsed += 1
                    self._rehearsing = True
                    yield Step(self, self.step, rehearsal=True)
                    self._rehearsing = False
                elif self._meet():
                    rehearsed = 0
                continue
            if not self.saves.is_open and not self._reopen():
                continue
            reached = self.ledger.exhausted or (self._until is not None and self.step >= self._until)
            if reached or self.wish.agreed:
                if leave(self, self._until, reached=reached):
                    return
                continue
            if self.rewinding.agreed is not None:
                self.rewinding.carry_out()
                continue
            step = Step(self, self.step)
            yield step
            if not step.entered:
                raise ConfigError(f"step {step.number} was never entered", hint="write `with step:` inside the loop")

    # -- for steps ---------------------------------------------------------------------------------

    def use(self, loader: Loader | Queue) -> None:
        """A step takes data from a loader or queue."""
        if loader not in self.tracked.others.values():
            self.ledger.use(loader)

    @property
    def queues(self) -> list[Queue]:
        """Those that steps took items from."""
        used = [*self.ledger.loaders, *self.tracked.others.values()]
        return [each for each in used if isinstance(each, Queue)]

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        """Any optimizer of this process is about to step."""
        step, number = self.current, self.step
        if any(optimizer is each for each in self.tracked.optimizers.values()):
            if step is None and has_gradients(optimizer):
                raise ConfigError(
                    f"an optimizer steps outside `with step:`, after step {number}", hint="move it into the block"
                )
            if step is not None:  # Else it changes nothing: a framework steps after a step that was skipped.
                step.before_update(optimizer)
        elif step is not None and not step.updates and self.tracked.has_to_do_with(optimizer):
            raise ConfigError(f"an untracked optimizer steps in step {number}", hint="run.track(optimizer=optimizer)")

    def wishes(self, loss: float, late: bool) -> list[int]:
        """This rank's part of a vote beyond the step itself; the smallest of each counts."""
        due = self.saves.due(self.step + 1, time.monotonic())
        flags = [-int(self.wish.asked), -int(late or self.healing.pending), -int(due)]
        return [to_word(loss), *flags, *self.rewinding.words(), *self.saves.words(), *self.healing.words()]

    def agreed(self, words: Sequence[int]) -> float:
        """What the ranks wish, taken together; the largest loss."""
        stop, late, due = (-word for word in words[1:4])
        self.wish.agree(stop)
        apart = words[9] != -words[10]
        if (late or apart) and not self.healing.late:
            self.healing.late = True
            self.say(f"step {self.step} {APART if apart else LATE}: all state is now copied before each step")
        self.saves.agreed = bool(due)
        self.rewinding.agree(words[4:7])
        self.saves.compare(self, words[7:9])
        return from_word(words[0])

    def commit(self, step: Step, *, late: bool) -> None:
        """A step counts: everything that follows from it."""
        self.step = step.number + 1
        for loader in step.loaders:
            loader.commit()
        self.once.forget(step.number)  # Those of this step: ranks may have to go back by one.
        self.fruitless.see(step)
        if self.spike is not None:
            self.rewinding.watch(self.spike, step)
        if step.rows:
            self.scribe.note(Row(self.step, time.time(), numbers(step.rows)), self._until)
        if self.page is not None:
            self.page.step()
            self.page.reach(self.step)
        self.healing.after(step, late=late)
        if self.saves.agreed:
            self.saves.agreed = False
            with self._hopeless():
                self.saves.save(self, None)

    def lost(self, number: int, loss: ArgosyError | None, *, torn: bool = False) -> None:
        """An attempt did not count, because a rank is lost, or because it failed after the vote.

        Raises:
            PeerLost: no rank is replaced here.
            Diverged: this rank has no state to continue from.
        """
        self.leaving.judge(number, loss)
        if torn:
            self._broken = "" if self.crew.kind == "replaceable" else f"step {number} failed after its first update"
            self.healing.tear(number, loss)
        if self.crew.kind != "replaceable":
            self.leaving.check(at_once=True)
            raise loss or PeerLost("a rank", "its process is gone")
        self._lost_at = self._lost_at or (time.monotonic(), in_words(loss))

    def failed(self, number: int, error: BaseException | None, *, whole: bool) -> None:
        """The user's own error ends this process; the state is that of the last step, if it is `whole`."""
        if self.crew.kind != "alone" or not whole:
            self._broken = f"step {number} raised {type(error).__name__}"
        if isinstance(error, ConfigError | Diverged | CollectiveMismatch):
            self.give_up()
        if self.crew.kind == "replaceable":
            if isinstance(error, SystemExit) and not error.code:
                self.leaving.say(site_of(error))
            elif isinstance(error, Exception | SystemExit) and self.crew.count(f"failed/{number}") >= FAILED_MAX:
                self.tell(f"step {number} failed {FAILED_MAX} times: giving up")
                self.give_up()
            self.crew.group.give_up(PeerLost(f"rank {self.rank}", f"it raised {type(error).__name__}: {error}"))
        elif self.crew.kind == "alone" and self.step and whole:
            self.saves.save(self, None)
            self.saves.flush()

    def say(self, text: str) -> None:
        """A line for the user, from rank 0."""
        if self.rank == 0:
            self.tell(text)

    def tell(self, text: str) -> None:
        """A line for the user, from this rank."""
        print(f"argosy: {text}", file=sys.stderr, flush=True)

    # -- meeting, leaving --------------------------------------------------------------------------

    def _must_rehearse(self, rehearsed: int) -> bool:
        if self.crew.kind != "replaceable":
            return False
        self._settles = self.crew.must_be_settled
        if not self._settles or rehearsed >= REHEARSALS or self.healing.restarts_together:
            return False
        if not self.used and not rehearsed:
            return True  # Whatever is made when a model is first used: a rank that was replaced has it.
        return not self.crew.group.settled()

    def _meet(self) -> bool:
        """Meet the other ranks and take over what is missing; False to try again."""
        if self.crew.kind != "replaceable":
            if self.crew.is_lost():
                raise self.crew.group.loss
            self.crew.joined = True
            self.healing.find_holders()
            self.healing.from_disk()
            self.saves.open(self, None)
            if self.page is not None:
                self.page.reach(self.step)
            return True
        try:
            view = self.crew.meet(self._is_no_use, settled=self._settles, at=self.healing.step)
            if self.healing.fresh:  # With nothing to save it can leave at once.
                self.wish.check()
            self.healing.heal(view)
            self.crew.healed()
        except NobodyCame as error:
            save_without_lost(self, f"{self._lost} and not replaced within {error.seconds:g} s")
            raise
        except (PeerLost, DeadlinePassed, Superseded) as error:
            self.crew.fail(error)
            if self.wish.is_urgent:
                save_without_lost(self, f"{self.wish.said} with {self._lost}")
            self.wish.check()
            return False
        if self.page is not None:
            self.page.reach(self.step)
        if self._lost_at is not None:
            since, what = self._lost_at
            self._lost_at = None
            if self.rank == self.healing.speaker:
                what += self.healing.replaced  # A loss names the first rank that was missing.
                self.tell(f"{what}; resumed step {self.step:,} after {time.monotonic() - since:.1f} s")
        return True

    @property
    def _lost(self) -> str:
        return self._lost_at[1] if self._lost_at is not None else "a rank is missing"

    def _is_no_use(self) -> bool:
        self.leaving.check()
        return self.wish.is_urgent

    def _reopen(self) -> bool:
        """A loop after another one: all ranks save again. False if one is lost."""
        try:
            self.saves.open(self, None)
        except (PeerLost, DeadlinePassed):
            if self.crew.kind != "replaceable":
                raise
        return self.saves.is_open

    def restored(self, step: int, source: str) -> None:
        """State came from disk."""
        self.step = step
        self.scribe.went_back(step)
        self.say(f"resumed from step {step:,} ({source})")
        if changed := bits_differences(self.ledger.stored_bits, self.ledger.bits):
            self.say(f"results may differ in their last bits from an uninterrupted run: {'; '.join(changed)}")

    def failed_rehearsal(self, error: BaseException) -> None:
        """A replaced rank could not even rehearse."""
        if isinstance(error, Exception) and self.crew.count(f"rehearsed/{self.crew.view}") >= FAILED_MAX:
            self.give_up()

    def give_up(self) -> None:
        """A replacement of this rank would fail as well: none is wanted."""
        if self.page is not None:
            self.page.set_flag(Flag.NO_REPLACEMENT)

    def begin_anew(self) -> NoReturn:
        """End this process so that another takes its place."""
        if self.page is not None:
            self.page.set_flag(Flag.REPLACE)
        raise SystemExit(1)

    @contextmanager
    def _hopeless(self) -> Generator[None]:
        """A mistake in the script: a replaced rank would make it again."""
        try:
            yield
        except (ConfigError, Diverged):
            self.give_up()
            raise
