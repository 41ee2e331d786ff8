"""Make a crew whole again: who takes which state from whom, carried out."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from argosy.checkpoint import Mark, Restored, StepNotFound, begin_series, restore
from argosy.core import ArgosyError, ConfigError, PeerLost
from argosy.train.healing import FromPeer, FromPockets, Told, decide_healing
from argosy.train.keeping import state_of
from argosy.train.pocket import Kind, Pocket, plan, unpack, write
from argosy.train.rows import Row
from argosy.train.scribe import merge_recent
from argosy.train.tracking import Capsule, bytes_of

if TYPE_CHECKING:
    from argosy.train.run import Run
    from argosy.train.step import Step


class Mending:
    """What a run knows of how its ranks' states relate, and how it heals."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self.fresh = True
        """This rank has no state that the others could go on from."""
        self.pristine = True
        """Nothing has changed since the script made it."""
        self.copies = True
        """The parameters of all ranks are copies of each other."""
        self.late = False
        """Some rank has done collectives after its first update, in some step."""
        self.pending = False
        """This one did, in a step that was decided before; the others do not know yet."""
        self.speaker = 0
        self._behind = True
        """Rank 0 does not know yet what its predecessor had no time to write."""
        self._said = False
        self._voted: dict[str, int] = {}
        """The versions of buffers, as torch counts them, when the last vote began."""
        self._final = -1
        self.holders: dict[str, tuple[int, ...]] = {}
        """Of what only some ranks have, such as the stages of a pipeline: who has it."""

    def heal(self, view: int) -> None:
        """With all ranks of a new view: everybody has the state of the same step afterwards.

        Raises:
            PeerLost, DeadlinePassed: one was lost meanwhile; meet again.
        """
        run = self._run
        begin_series(f"view{view}")
        full = run.pocket.steps("full") if run.pocket is not None else []
        mine = Told(self.fresh, run.step, self.copies, full, run.undo, self.late)
        said: list[tuple[Told, Mark | None, list[Row]]] = run.crew.gather((mine, run.saves.mark, run.scribe.recent))
        told = [each for each, _, _ in said]
        alive = [rank for rank, each in enumerate(told) if not each.fresh]
        self.speaker = alive[0] if alive else 0
        decision = decide_healing(told)
        run.scribe.recent = merge_recent([recent for _, _, recent in said])
        match decision:
            case FromPeer():
                self._from_peer(decision, told[decision.source])
            case FromPockets(step):
                self.from_pocket(step)
                if not alive:
                    self.compare()
            case _:
                self.from_disk()
                run.parallel.begin_alike()
                self.compare()
        if alive:
            self._be_like(told[alive[0]])
            self._find_holders()
        mark = next((mark for _, mark, _ in said if mark is not None), None)
        run.saves.open(run, mark)
        run.saves.forget()
        run.recheck.forget()
        self._catch_up()
        self.fresh = False

    def _be_like(self, told: Told) -> None:
        self.copies, self._run.undo, self.late = told.copies, told.undo, told.late

    def _from_peer(self, healing: FromPeer, source: Told) -> None:
        """The source sends its state to each fresh rank; what is local comes from that rank's own pocket."""
        run = self._run
        if healing.pocketed and run.rank == healing.source:
            self.from_pocket(healing.step)
        if run.rank == healing.source and healing.fresh:
            run.saves.wait_for_copy()
            capsule = run.tracked.capture()
            packed = plan(capsule)
            content = torch.empty(packed.size, dtype=torch.uint8)
            write(packed, capsule, content)
            for rank in healing.fresh:
                dist.send_object_list([packed.description, packed.size], rank)
                if packed.size:
                    dist.send(content, rank)
        elif run.rank in healing.fresh:
            head: list[Any] = [None, None]
            dist.recv_object_list(head, healing.source)
            content = torch.empty(head[1], dtype=torch.uint8)
            if head[1]:
                dist.recv(content, healing.source)
            self.pristine = False
            run.tracked.adopt(unpack(head[0], content))
            self._take_local(healing.step)
            run.step = healing.step
            if not healing.pocketed:
                # From here on the others may go on from this rank, even if all who had the state die now.
                self._be_like(source)
                self.fresh = False

    def _take_local(self, step: int) -> None:
        """What differs between ranks."""
        own = None if self._run.pocket is None else self._run.pocket.own_of(step)
        if own is not None:
            self._run.tracked.adopt(own)

    def from_pocket(self, step: int) -> None:
        """Take over this rank's own state of `step`, if it has another one."""
        run = self._run
        if not self.fresh and run.step == step:
            return
        capsule = None if run.pocket is None else run.pocket.get(step, "full")
        if capsule is None:
            raise PeerLost(f"rank {run.rank}", f"its shared memory no longer holds step {step}")
        run.saves.wait_for_copy()
        self.pristine = False
        run.tracked.adopt(capsule)
        if run.step > step:
            run.scribe.went_back(step)
        run.step = step

    def from_disk(self, *, quiet: bool = False) -> None:
        """The newest checkpoint; else that of the parent, if there is one."""
        run = self._run
        self._find_holders()
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
            self._run.tell(f"rank {self._run.rank} starts over: there is no checkpoint yet to resume from")
            self._run.begin_anew()
        if self._run.crew.view > 1:
            self._run.say("all ranks that had the state are lost and there is no checkpoint yet: starting over")
        self._run.step = 0

    def restore(self, directory: Path, step: int | None) -> Restored:
        """The state of a step, from a directory."""
        try:
            return restore(directory, into=state_of(self._run), step=step, partial=bool(self.holders))
        except ConfigError as error:
            raise ConfigError(
                f"the checkpoint in {directory} does not fit the tracked state: {error}",
                hint="undo the change, or start a new run in another directory",
            ) from error

    def _find_holders(self) -> None:
        run = self._run
        self.holders = {}
        names = run.crew.gather(sorted(state_of(run).units))
        everywhere = set(names[0]).intersection(*names[1:])
        for name in sorted({name for each in names for name in each} - everywhere):
            self.holders[name] = tuple(rank for rank, each in enumerate(names) if name in each)

    def compare(self) -> None:
        """Find out whether the ranks' parameters are copies of each other."""
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in self._run.tracked.parameters().items():
            digest.update(name.encode())
            if tensor.numel():
                digest.update(bytes_of(tensor))
        found = self._run.crew.gather(digest.hexdigest())
        self.copies = len(set(found)) == 1
        self.put_full()

    def before_vote(self, step: int, before: Capsule, *, final: bool) -> None:
        """What only this rank has goes where its replacement will find it; `final`: nothing changes any more."""
        run = self._run
        if run.pocket is None or not self.copies or not (buffers := run.tracked.buffers()):
            return
        changed = [name for name, now in buffers.items() if final or not torch.equal(now, before.tensors[name])]
        self._voted = {name: buffer._version for name, buffer in buffers.items()}
        if not changed and self._final < step - 1 and run.pocket.extend(step, "local"):
            return
        self._put_local(run.pocket, step, "local", Capsule(buffers, {"changed": changed}))

    def _put_local(self, pocket: Pocket, step: int, kind: Kind, capsule: Capsule) -> None:
        try:
            pocket.put(step, kind, capsule)
        except OSError as error:
            if not self._said:
                self._said = True
                self._run.tell(
                    f"no shared memory for the buffers of rank {self._run.rank} ({error.strerror}): if it is lost, its "
                    "replacement gets those of another rank; free /dev/shm, or enlarge it"
                )

    def _after_block(self, late: bool) -> None:
        """The same again, if something changed since the vote."""
        run = self._run
        if run.pocket is None or not self.copies or not (buffers := run.tracked.buffers()):
            return
        # What other ranks send is written past torch, which then counts no version.
        if not late and all(buffer._version == self._voted.get(name) for name, buffer in buffers.items()):
            return
        voted = run.pocket.get(run.step, "local")
        if voted is None or not all(torch.equal(now, voted.tensors[name]) for name, now in buffers.items()):
            self._final = run.step
            self._put_local(run.pocket, run.step, "final", Capsule(buffers, {}))

    def after(self, step: "Step", *, late: bool) -> None:
        """A step counts: learn whether the next one must be copied first, and keep what no other rank has."""
        run = self._run
        self.pending = late and not run.undo
        run.undo = self.late or (run.undo and step.number < 1)
        self.put_full()
        self._after_block(late)

    def put_full(self) -> None:
        """Where ranks hold different parameters each keeps its own, every step."""
        run = self._run
        if run.pocket is None or self.copies:
            return
        try:
            run.pocket.put(run.step, "full", run.tracked.capture())
        except OSError as error:
            raise ArgosyError(
                f"no shared memory for this rank's state: {error.strerror}", hint="free /dev/shm, or enlarge it"
            ) from error

    def _catch_up(self) -> None:
        """A new rank 0 writes the rows that the old one had no time for, once it has met the others."""
        if self._run.rank == 0 and self._behind:
            self._run.scribe.catch_up()
        self._behind = False
