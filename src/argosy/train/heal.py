"""Give every rank the state of the same step after ranks have met: carry `heal_decision.py` out."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from argosy.checkpoint import Mark, Restored, StepNotFound, begin_series, restore
from argosy.core import ArgosyError, ConfigError, PeerLost, format_ranks
from argosy.train.arena import Arena, Kind, Packing, unpack, write
from argosy.train.checkpoint_schedule import state_of
from argosy.train.heal_decision import FromArenas, FromPeer, Told, Version, decide_healing
from argosy.train.rows import Row
from argosy.train.scribe import merge_recent
from argosy.train.step import Diverged
from argosy.train.tracking import bytes_of
from argosy.transfer import Ownership, take_over, tensors_state

if TYPE_CHECKING:
    from argosy.train.run import Run
    from argosy.train.step import Step


class Healing:
    """What a run knows of how its ranks' states relate, and how it heals."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self.fresh = True
        """This rank has no state that the others could continue from."""
        self.origin = 0
        """The step to begin with where there is no checkpoint: a framework may bring one of its own."""
        self.restarts_together = False
        """A lost rank ends all others too, and all resume from what their arenas hold."""
        self.torn = False
        """Its last step failed after the vote."""
        self.pristine = True
        """Nothing has changed since the script made it."""
        self.version = Version()
        """Of the state that this rank has."""
        self.late = False
        """In some step a rank did what only a copy of all state can undo."""
        self.pending = False
        """This one did, in a step that was decided before; the others do not know yet."""
        self.speaker = 0
        self.ownership = Ownership([], {}, set())
        self.apart: list[torch.Tensor] = []
        """What checkpoints keep under the name of this rank."""
        self._behind = True
        """There may be rows that rank 0, or its predecessor, had no time to write."""
        self._said = False
        self.replaced = ""
        """Which ranks came new to the last meeting, in words, if they were several."""
        self._voted: dict[str, int] = {}
        """The versions of buffers, as torch counts them, when the last vote began."""
        self._changed: list[str] = []
        """The buffers that differ between ranks, as of the last vote."""
        self._final = -1
        self._before_update: dict[str, torch.Tensor] = {}
        """The buffers when the first optimizer stepped, where the vote comes later."""
        self._after_update = 0
        """A digest of the buffers that changed after the update. Of a rank that is lost there nobody knows its own."""
        self.holders: dict[str, tuple[int, ...]] = {}
        """Of what only some ranks have, such as the stages of a pipeline: who has it."""

    @property
    def replicated(self) -> bool:
        """Whether a rank can take over the state of another: parameters and moments of all are replicas."""
        return not (self.ownership.owned or self._run.tracked.splits_moments or self.restarts_together)

    @property
    def step(self) -> int:
        """The step that this rank has the state of, -1 if it has none."""
        return -1 if self.fresh else self._run.step

    def heal(self, view: int) -> None:
        """With all ranks of a new view: everybody has the state of the same step afterwards.

        Raises:
            PeerLost, DeadlinePassed: one was lost meanwhile; meet again.
            ConfigError: nothing says who owns a parameter.
        """
        run = self._run
        begin_series(f"view{view}")
        self.ownership = run.tracked.ownership(run.size)
        held = run.arena.held() if run.arena is not None and not self.replicated else []
        late = self.late or self.pending or self.torn or run.crew.counted("late") > 0
        mine = Told(self.fresh, self.version, self.replicated, self.torn, held, run.undo or late, late)
        said: list[tuple[Told, Mark | None, list[Row]]] = run.crew.gather((mine, run.saves.mark, run.scribe.recent))
        told = [each for each, _, _ in said]
        alive = [rank for rank, each in enumerate(told) if not each.fresh]
        fresh = [rank for rank, each in enumerate(told) if each.fresh]
        self.replaced = f"; ranks {format_ranks(fresh)} replaced" if len(fresh) > 1 else ""
        self.speaker = alive[0] if alive else 0
        run.scribe.recent = merge_recent([recent for _, _, recent in said])
        self.find_holders()
        self.late = any(each.late for each in told)
        torn = any(each.torn for each in told)
        if torn:
            run.crew.count("late")
        match decide_healing(told):
            case FromPeer(source, version, to):
                self._from_peer(source, version, to)
            case FromArenas(version):
                self.from_arena(version)
            case _:
                self.from_disk()
                run.parallel.begin_alike()
                self.version = Version(run.step, view)
                self.put_full()
        run.undo = self.late or any(each.undo for each in told if not each.fresh) or (run.undo and not alive)
        marks = [mark for _, mark, _ in said if mark is not None]
        run.saves.open(run, max(marks, key=lambda mark: mark.saves, default=None))
        run.saves.forget()
        run.recheck.forget()
        self._catch_up()
        self.fresh = self.torn = False
        if torn and run.rank == self.speaker:
            run.tell(
                f"a rank was lost in a step that had changed state already: all ranks went back to step {run.step:,}; "
                "from now on all state is copied before each step"
            )

    def _from_peer(self, source: int, version: Version, to: tuple[int, ...]) -> None:
        """The source sends its state to each rank that lacks it; what is local comes from that rank's own arena."""
        run = self._run
        if run.rank == source and to:
            run.saves.wait_for_copy()
            packed = Packing().plan(run.tracked.state())
            content = torch.empty(packed.size, dtype=torch.uint8)
            write(packed, content)
            for rank in to:
                dist.send_object_list([packed.description, packed.size], rank)
                if packed.size:
                    dist.send(content, rank)
        elif run.rank in to:
            head: list[Any] = [None, None]
            dist.recv_object_list(head, source)
            content = torch.empty(head[1], dtype=torch.uint8)
            if head[1]:
                dist.recv(content, source)
            run.saves.wait_for_copy()
            self.fresh, self.pristine = True, False
            take_over(run.tracked.state(), unpack(head[0], content))
            self.take_local(version.step)
            self._become(version)
            # From here on the others may continue from this rank, even if all who had the state die now.
            self.fresh, self._behind = False, True

    def take_local(self, step: int) -> None:
        """What differs between ranks."""
        own = None if self._run.arena is None else self._run.arena.own_of(step)
        if own is not None:
            self._run.tracked.take_over_buffers(own.tensors())

    def from_arena(self, version: Version) -> None:
        """Take over this rank's own state of `version`, if it has another one."""
        run = self._run
        if not self.fresh and not self.torn and self.version == version:
            return
        held = None if run.arena is None else run.arena.full(version)
        if held is None:
            raise ArgosyError(f"the arena of rank {run.rank} no longer holds step {version.step}")
        run.saves.wait_for_copy()
        self.fresh, self.pristine = True, False  # Until all is taken over, nobody may continue from this rank.
        take_over(run.tracked.state(self.apart), held)
        if run.step > version.step:
            run.scribe.went_back(version.step)
        self._become(version)
        self.fresh = self.torn = False

    def tear(self, number: int, loss: ArgosyError | None) -> None:
        """A step failed after the vote: this rank's state belongs to no step.

        Raises:
            Diverged: the ranks cannot meet again to go back.
        """
        run, self.torn = self._run, True
        if loss is not None:
            return
        what = f"step {number}: an optimizer stepped, then gradients of another were not finite"
        if run.crew.kind != "replaceable":
            raise Diverged(what, hint="the same command resumes from the last checkpoint")
        run.tell(f"{what}; all ranks go back")
        run.crew.group.give_up(PeerLost(f"rank {run.rank}", "its gradients are not finite"))
        run.crew.open_view()

    def _become(self, version: Version) -> None:
        self._run.step, self.version = version.step, version

    def from_disk(self, *, quiet: bool = False) -> None:
        """The newest checkpoint; else that of the parent, if there is one."""
        run = self._run
        run.saves.wait_for_copy()
        if not self.fresh:  # What was made after that step belongs to another past.
            run.once.forget()
            if run.arena is not None:
                run.arena.clear()
        self.fresh = True  # Until all is taken over, nobody may continue from this rank.
        try:
            found = self.restore(run.directory, None)
        except StepNotFound:
            if run.parent is None:
                self._begin_anew()
                return
            found = self.restore(*run.parent)
            found.source = f"{run.parent[0]}, {found.source}"
        if found.kept:
            raise ConfigError(f"the checkpoint does not have {', '.join(found.kept[:5])}", hint="did the model change?")
        run.step = found.step
        if not quiet:
            run.restored(found.step, found.source)

    def _begin_anew(self) -> None:
        """There is no checkpoint yet: all ranks begin at step 0, with what their scripts made.

        Raises:
            SystemExit: this rank has trained since; a new process takes its place.
        """
        if not self.pristine:
            self._run.tell(f"no checkpoint yet: rank {self._run.rank} starts at step 0")
            self._run.begin_anew()
        if self._run.crew.view > 1 or self._run.crew.generation:
            self._run.say("all ranks that had the state are lost and there is no checkpoint yet: starting over")
        self._run.step = self.origin

    def restore(self, directory: Path, step: int | None) -> Restored:
        """The state of a step, from a directory."""
        try:
            return restore(directory, into=state_of(self._run), step=step, partial=bool(self.holders))
        except ConfigError as error:
            raise ConfigError(
                f"the checkpoint in {directory} does not fit the tracked state: {error}",
                hint="undo the change, or start a new run in another directory",
            ) from error

    def find_holders(self) -> None:
        """Find out who has what.

        Raises:
            ConfigError: nothing says who owns a parameter that all ranks have.
        """
        run = self._run
        self.ownership = run.tracked.ownership(run.size)
        mine = run.tracked.parameters()
        shared = set[str].intersection(*map(set, run.crew.gather(list(mine))))
        self.ownership.refuse(shared)
        self.apart = self.ownership.apart(shared, {id(each): name for name, each in run.tracked.named().items()})
        self.holders = {}
        names = run.crew.gather(sorted(state_of(run).units))
        everywhere = set(names[0]).intersection(*names[1:])
        for name in sorted({name for each in names for name in each} - everywhere):
            self.holders[name] = tuple(rank for rank, each in enumerate(names) if name in each)

    def before_vote(self, step: int, before: Mapping[str, torch.Tensor], *, final: bool) -> None:
        """What only this rank has goes where its replacement will find it; `final`: nothing changes any more."""
        run = self._run
        if run.arena is None or not self.replicated or not (buffers := run.tracked.buffers()):
            return
        if final:
            self._note_changes(self._before_update, buffers)
            self._before_update = {}
        changed = [name for name, buffer in buffers.items() if final or not torch.equal(buffer, before[name])]
        self._voted = {name: buffer._version for name, buffer in buffers.items()}
        if not changed and not self._changed and self._final < step - 1 and run.arena.extend(step, "local"):
            return
        self._changed = changed
        self._put_local(run.arena, step, "local", buffers)

    def before_update(self) -> None:
        """The first optimizer steps, and the vote is at the end of the block: what changes in between is found."""
        if self._run.arena is not None and self.replicated:
            self._before_update = {name: buffer.clone() for name, buffer in self._run.tracked.buffers().items()}

    def _note_changes(self, before: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        seen, changed = hashlib.blake2b(digest_size=7), [n for n in before if not torch.equal(buffers[n], before[n])]
        for name in changed:
            seen.update(name.encode() + bytes_of(buffers[name]))
        self._after_update = int.from_bytes(seen.digest(), "little") if changed else 0

    def words(self) -> list[int]:
        """This rank's part of a vote: equal on all ranks, where what is done after an update is the same on all."""
        return [self._after_update, -self._after_update]

    def _put_local(self, arena: Arena, step: int, kind: Kind, buffers: Mapping[str, torch.Tensor]) -> None:
        state = tensors_state(buffers)
        state.values["changed"] = self._changed
        try:
            arena.put(kind, Version(step), state)
        except OSError as error:
            if not self._said:
                self._said = True
                self._run.tell(
                    f"no memory for the buffers of rank {self._run.rank} ({error.strerror}): if it is lost, its "
                    "replacement gets those of another rank; free /dev/shm, or enlarge it"
                )

    def _after_block(self, late: bool) -> None:
        """The same again, if something changed since the vote."""
        run = self._run
        if run.arena is None or not self.replicated or not (buffers := run.tracked.buffers()):
            return
        # What other ranks send is written past torch, which then counts no version.
        if not late and all(buffer._version == self._voted.get(name) for name, buffer in buffers.items()):
            return
        voted = run.arena.get(run.step, "local")
        if voted is not None:
            self._note_changes(voted.tensors(), buffers)
        if voted is None or self._after_update:
            self._final = run.step
            self._put_local(run.arena, run.step, "final", buffers)

    def after(self, step: "Step", *, late: bool) -> None:
        """A step counts: learn whether the next one must be copied first, and keep what no other rank has."""
        run, base = self._run, self.version
        self.version, self.pristine = Version(run.step, run.crew.tried), False
        self.pending = late and not run.undo
        run.undo = self.late or (run.undo and step.number < 1)
        self.put_full(base)
        self._after_block(late)

    def put_full(self, base: Version | None = None) -> None:
        """Where ranks hold parts of their own each keeps its own, every step."""
        run = self._run
        if run.arena is None or self.replicated:
            return
        try:
            run.arena.put("full", self.version, run.tracked.state(self.apart), base=base)
        except OSError as error:
            raise ArgosyError(
                f"no memory for the state of rank {run.rank}: {error.strerror}",
                hint="free /dev/shm or the disk of the runtime directory, or enlarge them",
            ) from error

    def _catch_up(self) -> None:
        """A new rank 0 writes the rows that the old one had no time for, once it has met the others."""
        if self._run.rank == 0 and self._behind:
            self._run.scribe.catch_up()
        self._behind = False
