"""The process group: torch's methods, three states, and an inside that can be exchanged.

G1  A joining group answers every operation locally; a live one asks its peers; a lost one raises its loss, or,
    while a latch is set, answers locally.
G2  Operations of a group run in the order in which they were issued, on one thread. A synchronous one runs in
    the caller's thread if nothing is queued.
G3  Re-forming exchanges engine, postman and fallback; object, name, rank and size stay.
"""

# Torch's own stubs disagree with each other about names and options of these methods.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# pyright: reportAssignmentType=false, reportPrivateUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from argosy.collective import plans, registry
from argosy.collective.arguments import (
    check_one_per_rank,
    check_whole,
    hide_from_dynamo,
    reduction_code,
    reduction_options,
    seconds,
    split,
)
from argosy.collective.inside import Inside
from argosy.collective.latch import Latch
from argosy.collective.layouts import layout_of, models_of
from argosy.collective.plans import Plan
from argosy.collective.postman import Letter
from argosy.collective.rendezvous import Meeting
from argosy.collective.segment import ROOM_BYTES
from argosy.collective.wire import dtype_name
from argosy.collective.work import Queue, Work
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.observe import count_collective, mark_waiting

OPERATIONS = [
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
]

State = Literal["joining", "live", "lost"]


class Group(dist.ProcessGroup):
    """A `torch.distributed.ProcessGroup`; made by `init_process_group("argosy")` and `new_group`."""

    supports_coalescing = False
    supports_splitting = True

    def __init__(self, store: Any, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._timeout = registry.own_store(store, ranks), timeout
        self._place, self._ranks = (rank, size), tuple(ranks)
        self._name, self._description = "", "undefined"
        self.state: State = "joining"
        self.generation = self._splits = 0
        self.loss: ArgosyError | None = None
        self._inside: Inside | None = None
        self._models: list[weakref.ref[Any]] | None = None
        self._queue = Queue(f"argosy-group-{rank}")
        registry.add(self)
        if not registry.joining():
            self._form(0, timeout.total_seconds(), partial(registry.is_one_lost, ranks))

    # -- names -------------------------------------------------------------------------------------

    def name(self) -> str:
        return "argosy"

    getBackendName = _get_backend_name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]

    getRank, getSize = rank, size

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_group_store(self) -> Any:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Torch asks each new group for it; ours counts in its engine."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Torch asks a group with a device for it; ours is connected."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    # -- life --------------------------------------------------------------------------------------

    def latched(self) -> Latch:
        """Begin a step in which no loss raises; its vote decides whether the step counts."""
        if self._models is None:
            self._models = models_of(self)
        return Latch(self)

    def rehearse(self, step: Callable[[], object], times: int = 3) -> None:
        """Run a newcomer's forward and backward pass alone, as often as DDP needs to settle its buckets.

        It rebuilds them in the second pass and says how in the third; `reform` compares that.

        Raises:
            ConfigError: the group is not joining.
        """
        if self.state != "joining":
            raise ConfigError(f"only a group that is joining can rehearse; this one is {self.state}")
        for _ in range(times):
            step()
        self._models = models_of(self)

    def settled(self) -> bool:
        """Whether the DDP models of this process, if any, have laid their gradients out in buckets for good."""
        self._models = models_of(self)
        return not self._models or bool(layout_of(self._models))

    def look(self) -> None:
        """Take note of a loss that nobody has met yet."""
        if self.state == "live" and self._inside is not None:
            try:
                self._inside.ward.check()
            except ArgosyError as loss:
                self.lose(loss)

    def reform(
        self,
        members: Sequence[int] | None,
        generation: int,
        *,
        timeout_s: float = 60.0,
        give_up: Callable[[], bool] | None = None,
    ) -> None:
        """Meet the members again as `generation`, and go on with them in this same object.

        The other groups of this process whose ranks are all in this one are re-formed with it. Bucket layouts of DDP
        models that exist since the first latch or rehearsal are compared. `give_up` is asked while waiting: True ends
        it.

        Raises:
            ConfigError: `members` are not the ranks of the group, or the generation does not grow.
            PeerLost, DeadlinePassed, Superseded: the group stays as it was; try with a newer generation.
            ArgosyError: layouts differ.
        """
        if members is not None and sorted(members) != list(range(self.size())):
            raise ConfigError(f"a group keeps its {self.size()} members: {list(members)}")
        if self._inside is not None and generation <= self.generation:
            raise ConfigError(f"the generation must grow beyond {self.generation}: {generation}")
        deadline = time.monotonic() + timeout_s
        formed: list[Group] = []
        try:
            for group in registry.groups():
                if group is self or set(group._ranks) <= set(self._ranks):
                    group._form(generation, max(0.0, deadline - time.monotonic()), give_up)
                    formed.append(group)
        except ArgosyError as error:
            for group in formed:  # the peers may be in them already, and wait for this rank
                group.give_up(error)
            raise

    def _form(self, generation: int, timeout_s: float, give_up: Callable[[], bool] | None) -> None:
        (rank, size), layout, name = self._place, layout_of(self._models or []), self._name or "default"
        room = ROOM_BYTES - sum(group.memory() for group in registry.groups() if group is not self)
        meeting = Meeting(name=name, rank=rank, size=size, generation=generation, layout=layout, room=max(0, room))
        old, inside = self._inside, Inside(self._store, meeting, self._timeout)
        if old is not None:
            self.lose(PeerLost(f"generation {self.generation}", "it is being replaced"))
            old.ward.abort(f"generation {generation} is formed")
            old.close()
        self.drain(timeout_s)
        inside.open(self._ranks, timeout_s, give_up)
        self._inside, self.generation, self.loss, self.state = inside, generation, None, "live"
        inside.ward.on_loss = self._heard

    def memory(self) -> int:
        """Bytes of shared memory that this rank holds for the group."""
        engine = None if self._inside is None else self._inside.engine
        return 0 if engine is None else engine.segment.shape.stride

    def _heard(self) -> None:
        """A peer died: the watcher's thread tells."""
        inside, latch = self._inside, registry.latch()
        if latch is None or inside is None:
            return
        with suppress(Exception):
            try:
                inside.ward.check()
            except ArgosyError as loss:
                latch.trip(loss)

    def lose(self, loss: ArgosyError) -> None:
        if self.loss is None and self.state == "live":
            self.loss, self.state = loss.with_traceback(None), "lost"  # frames would hold the engine's memory

    def give_up(self, loss: ArgosyError) -> None:
        """Count as lost, and let no rank of the group wait for this one."""
        if self.state == "live" and self._inside is not None:
            self._inside.ward.abort(str(loss))
            self.lose(loss)

    def drain(self, timeout_s: float) -> None:
        """Wait until nothing that was issued is still running."""
        self._queue.drain(timeout_s)

    def agree(self, words: Sequence[int]) -> list[int]:
        """Return the smallest of each word over all ranks.

        Raises:
            PeerLost, DeadlinePassed: the group is lost, on all survivors alike.
        """
        if self.state == "joining":
            return list(words)
        if self.loss is not None:
            raise self.loss
        assert self._inside is not None
        return self._inside.agree(words, self._timeout.total_seconds())

    def shutdown(self) -> None:
        self._queue.close()
        if self._inside is not None:
            self._inside.close()
        registry.remove(self)

    def abort(self) -> None:
        self.give_up(PeerLost(f"rank {self.rank()}", "it aborted the group"))

    # -- carrying out ------------------------------------------------------------------------------

    def _issue(self, plan: Plan, opts: Any) -> Work:
        index, site = count_collective(self, plan.name)
        if (latch := registry.latch()) is not None:
            latch.issued += 1
        work = Work(plan.result, plan.name, site)
        if self.state != "live" and self._answered(plan, work):
            return work
        timeout_s = seconds(getattr(opts, "timeout", None), self._timeout)
        job = partial(self._run, plan, work, timeout_s, site)
        if getattr(opts, "asyncOp", True) is False and self._queue.idle():
            mark_waiting(index, True)
            try:
                job()
            finally:
                mark_waiting(index, False)
        else:
            work.on_wait = partial(mark_waiting, index)
            self._queue.put(job)
        return work

    def _answered(self, plan: Plan, work: Work) -> bool:
        """Finish without the peers if that is how the group stands (G1)."""
        if self.state == "live":
            return False
        if self.state == "joining" or registry.latch() is not None:
            with torch.no_grad():
                plan.answer()
            work.finish()
        else:
            work.finish(self.loss)
        return True

    def _run(self, plan: Plan, work: Work, timeout_s: float, site: str = "") -> None:
        try:
            if self._answered(plan, work):
                return
            assert self._inside is not None
            source = self._inside.carry_out(plan, timeout_s, site)
        except (PeerLost, DeadlinePassed) as loss:
            self.lose(loss)
            latch = registry.latch()
            if latch is not None:
                latch.trip(loss)
            self._answered(plan, work)
        except BaseException as error:
            work.finish(registry.kept_back(error))
        else:
            work.finish(source=source)

    # -- operations --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        return self._all_reduce("all_reduce", tensors, opts, "allreduce")

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._all_reduce("all_reduce", tensors, opts, "allreduce_coalesced")

    def _all_reduce(self, name: str, tensors: Any, opts: Any, method: str) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = opts if hasattr(opts, "reduceOp") else reduction_options(opts)
        return self._issue(plans.all_reduce(name, tensors, reduction_code(opts), (method, (tensors, opts))), opts)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        plan = plans.reduce(tensors[0], reduction_code(opts), opts.rootRank, self._place, ("reduce", (tensors, opts)))
        return self._issue(plan, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        plan = plans.broadcast(tensors, opts.rootRank, self._place, ("broadcast", (tensors, opts)))
        return self._issue(plan, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._issue(plans.all_gather(outputs, inputs, self.size(), ("allgather", (outputs, inputs))), opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        # outputs[rank][index]; a plan wants outputs[index][rank].
        turned = [list(column) for column in zip(*outputs, strict=True)]
        plan = plans.all_gather(turned, inputs, self.size(), ("allgather_coalesced", (outputs, inputs)))
        return self._issue(plan, opts)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        check_whole("all_gather", output, given, self.size())
        plan = plans.all_gather([output], [given], self.size(), ("_allgather_base", (output, given)))
        return self._issue(plan, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        gloo = ("allgather_into_tensor_coalesced", (outputs, inputs))
        return self._issue(plans.all_gather(list(outputs), list(inputs), self.size(), gloo), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        gloo = ("reduce_scatter", (outputs, inputs, opts))
        return self._issue(
            plans.reduce_scatter(list(outputs), list(inputs), reduction_code(opts), self._place, gloo), opts
        )

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        check_whole("reduce_scatter", given, output, self.size())
        gloo = ("_reduce_scatter_base", (output, given, opts))
        return self._issue(plans.reduce_scatter([output], [given], reduction_code(opts), self._place, gloo), opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        gloo = ("reduce_scatter_tensor_coalesced", (outputs, inputs, opts))
        return self._issue(
            plans.reduce_scatter(list(outputs), list(inputs), reduction_code(opts), self._place, gloo), opts
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        own: list[torch.Tensor] = outputs[0] if outputs else []
        gloo = ("gather", (outputs, inputs, opts))
        return self._issue(plans.gather(own, inputs[0], opts.rootRank, self._place, gloo), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        given: list[torch.Tensor] = inputs[0] if inputs else []
        gloo = ("scatter", (outputs, inputs, opts))
        return self._issue(plans.scatter(outputs[0], given, opts.rootRank, self._place, gloo), opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        check_one_per_rank("all_to_all", "output", outputs, self.size())
        check_one_per_rank("all_to_all", "input", inputs, self.size())
        plan = plans.all_to_all(outputs, inputs, list(outputs), ("alltoall", (outputs, inputs)))
        return self._issue(plan, opts)

    def all_to_all_single(
        self, output: Any, given: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        size = self.size()
        gloo = ("alltoall_base", (output, given, output_splits, input_splits))
        whole = output.detach()
        target = whole if whole.is_contiguous() else whole.contiguous()
        outputs = split(target, output_splits, size)
        plan = plans.all_to_all(outputs, split(given.detach().contiguous(), input_splits, size), [output], gloo)
        if target is not whole:
            plan.after = lambda: whole.copy_(target)
        return self._issue(plan, opts)

    def barrier(self, opts: Any = None) -> Work:
        return self._issue(plans.barrier(("barrier", ())), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a deadline of its own. It names all who have not come, as every operation does."""
        opts = dist.BarrierOptions()
        opts.timeout, opts.asyncOp = timeout or self._timeout, False
        self.barrier(opts).wait()

    def split_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None, **names: Any
    ) -> "Group | None":
        """A new group of these ranks of this one, which all of them ask for; None on a rank that is not among them."""
        if self.rank() not in ranks:
            return None
        self._splits += 1  # else a second group of the same ranks would meet the first one's word
        name = names.get("group_name") or f"{self._name}:{self._splits}:{'-'.join(map(str, ranks))}"
        store, world = dist.PrefixStore(f"{name}/", self._store), [self._ranks[rank] for rank in ranks]
        part = Group(store, list(ranks).index(self.rank()), len(ranks), world, timeout or self._timeout)
        part._set_group_name(name)
        part._set_group_desc(names.get("group_desc") or "undefined")
        return part

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        return self._post("send", tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        return self._post("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._post("recv", tensors, -1, tag)

    def _post(self, name: str, tensors: Any, peer: int, tag: int) -> Work:
        index, site = count_collective(self, name, p2p=True)
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        work = Work(tensors, name, site)
        work.on_wait = partial(mark_waiting, index)
        method = "recv_anysource" if peer < 0 else name
        plan = plans.letter(name, tensors, (method, (tensors, tag) if peer < 0 else (tensors, peer, tag)))
        if self._answered(plan, work):
            return work
        inside = self._inside
        assert inside is not None
        if not inside.takes(tensors):
            # Each on its own thread: a send must not wait for a receive that was issued after it.
            how = (plan, work, self._timeout.total_seconds(), site)
            threading.Thread(target=self._run, args=how, daemon=True).start()
            return work
        memory = plans.Memory()
        part = memory.read(tensors[0]) if name == "send" else memory.write(tensors[0])
        letter = Letter(peer, tag, part, self._timeout.total_seconds())
        letter.site, letter.dtype = site, dtype_name(tensors[0].dtype)

        def done(error: BaseException | None) -> None:
            if error is None:
                with torch.no_grad():
                    memory.write_back()
            elif isinstance(error, PeerLost | DeadlinePassed):
                self.lose(error)
                latch = registry.latch()
                if latch is not None:
                    latch.trip(error)
                    error = None
            work.finish(error, letter.peer)

        letter.done = done
        (inside.postman().send if name == "send" else inside.postman().receive)(letter)
        return work


hide_from_dynamo(Group, OPERATIONS)
