"""The process group: torch's methods, three states, and a transport that re-forming replaces.

G1  A joining group answers every operation locally, or meets its peers at its first one. A live one exchanges with
    them. A lost one raises its loss, or, while a latch says so, answers locally.
G2  The operations of a group run in the order of their issue, on one thread. A synchronous one runs in the caller's
    thread if nothing is queued.
G3  Re-forming replaces the transport; object, name, rank and size stay.
"""

# The methods follow torch's names and options, on which its own stubs disagree.
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
    OPERATIONS,
    check_one_per_rank,
    check_whole,
    hide_from_dynamo,
    reduction_code,
    reduction_options,
    seconds,
    split,
)
from argosy.collective.ddp_buckets import bucket_layout, ddp_models
from argosy.collective.latch import Latch
from argosy.collective.p2p import P2PMessage
from argosy.collective.plans import OperationPlan
from argosy.collective.reconfigured import Backends
from argosy.collective.rendezvous import Meeting, wants_gloo
from argosy.collective.request import dtype_name
from argosy.collective.segment import ROOM_BYTES
from argosy.collective.transport import Transport
from argosy.collective.work import JobQueue, Work
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.observe import count_collective, mark_waiting
from argosy.transfer import synchronize_stream

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
        self._transport: Transport | None = None
        self._models: list[weakref.ref[Any]] | None = None
        self.backends = Backends()
        self._queue = JobQueue(f"argosy-group-{rank}")
        registry.add(self)
        if not registry.state.joining:
            self._form(0, timeout.total_seconds(), partial(registry.raise_known_loss, ranks))

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
        """Nothing to do, though torch calls it for each new group: the engine counts."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Nothing to do, though torch calls it for a group with a device: this group is connected."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    # -- life --------------------------------------------------------------------------------------

    def latched(self) -> Latch:
        """Begin a step in which no loss is raised; its vote decides whether the step is committed."""
        if self._models is None:
            self._models = ddp_models(self)
        return Latch(self)

    def rehearse(self, step: Callable[[], object], times: int = 3) -> None:
        """Run a replacement's forward and backward pass without peers, as often as DDP needs to build its buckets.

        DDP rebuilds them in the second pass and reports them in the third; `reform` compares the reports.

        Raises:
            ConfigError: the group is not joining.
        """
        if self.state != "joining":
            raise ConfigError(f"only a group that is joining can rehearse; this one is {self.state}")
        for _ in range(times):
            step()
        self._models = ddp_models(self)

    def settled(self) -> bool:
        """Whether the DDP models of this process, if any, have built their final buckets."""
        self._models = ddp_models(self)
        return not self._models or bool(bucket_layout(self._models))

    def check_loss(self) -> None:
        """Record a loss that no operation has met yet."""
        if self.state == "live" and self._transport is not None and (loss := self._transport.loss()) is not None:
            self.lose(loss)

    def reform(
        self,
        members: Sequence[int] | None,
        generation: int,
        *,
        timeout_s: float = 60.0,
        give_up: Callable[[], bool] | None = None,
    ) -> None:
        """Meet the members again as `generation`; afterwards this object is live again.

        Other groups of this process whose ranks are all in this one are re-formed, too. The bucket layouts of DDP
        models that existed at the first latch or rehearsal are compared. `give_up` is polled while waiting: True ends
        the wait.

        Raises:
            ConfigError: `members` are not the ranks of the group, or the generation does not grow.
            PeerLost, DeadlinePassed, Superseded: the group is unchanged; retry with a newer generation.
            ArgosyError: the layouts differ.
        """
        if members is not None and sorted(members) != list(range(self.size())):
            raise ConfigError(f"a group keeps its {self.size()} members: {list(members)}")
        if self._transport is not None and generation <= self.generation:
            raise ConfigError(f"the generation must grow beyond {self.generation}: {generation}")
        deadline = time.monotonic() + timeout_s
        formed: list[Group] = []
        try:
            for group in registry.groups():
                if group is self or set(group._ranks) <= set(self._ranks):
                    group._form(generation, max(0.0, deadline - time.monotonic()), give_up)
                    formed.append(group)
        except ArgosyError as error:
            for group in formed:  # Peers may already be in them, and wait for this rank.
                group.give_up(error)
            raise

    def _form(self, generation: int, timeout_s: float, give_up: Callable[[], bool] | None) -> None:
        (rank, size), layout, name = self._place, bucket_layout(self._models or []), self._name or "default"
        room = ROOM_BYTES - sum(group.memory() for group in registry.groups() if group is not self)
        gloo, room = wants_gloo(), max(0, room)
        meeting = Meeting(name=name, rank=rank, size=size, generation=generation, layout=layout, room=room, gloo=gloo)
        old, transport = self._transport, Transport(self._store, meeting, self._timeout, self.backends)
        if old is not None:
            self.lose(PeerLost(f"generation {self.generation}", "it is being replaced"))
            old.abort(f"generation {generation} is formed")
            old.close()
        self.drain(timeout_s)
        transport.open(self._ranks, timeout_s, give_up)
        self._transport, self.generation, self.loss, self.state = transport, generation, None, "live"
        transport.on_loss = self._on_loss

    def memory(self) -> int:
        """Bytes of shared memory that this rank holds for the group."""
        shared = None if self._transport is None else self._transport.shared
        return 0 if shared is None else shared.segment.shape.stride

    def _on_loss(self) -> None:
        """A peer has died; called on the watcher's thread."""
        transport, latch = self._transport, registry.state.latch
        if latch is None or transport is None:
            return
        with suppress(Exception):
            if (loss := transport.loss()) is not None:
                latch.trip(loss)

    def lose(self, loss: ArgosyError) -> None:
        if self.loss is None and self.state == "live":
            self.loss, self.state = loss.with_traceback(None), "lost"  # Frames would keep the engine's memory alive.

    def give_up(self, loss: ArgosyError) -> None:
        """Become lost, and end the waits of the other ranks."""
        if self.state == "live" and self._transport is not None:
            self._transport.abort(str(loss))
            self.lose(loss)

    def drain(self, timeout_s: float) -> None:
        """Wait until all issued operations have ended."""
        self._queue.drain(timeout_s)

    def agree(self, words: Sequence[int]) -> list[int]:
        """Return the minimum of each word over all ranks.

        Raises:
            PeerLost, DeadlinePassed: the group is lost, on all survivors.
        """
        if self.state == "joining":
            return list(words)
        if self.loss is not None:
            raise self.loss
        assert self._transport is not None
        return self._transport.agree(words, self._timeout.total_seconds())

    def shutdown(self) -> None:
        self._queue.close()
        if self._transport is not None:
            self._transport.close()
        registry.remove(self)

    def abort(self) -> None:
        self.give_up(PeerLost(f"rank {self.rank()}", "it aborted the group"))

    # -- carrying out ------------------------------------------------------------------------------

    def _issue(self, plan: OperationPlan, opts: Any) -> Work:
        index, site = count_collective(self, plan.name)
        plan.synchronous = getattr(opts, "asyncOp", True) is False
        work = self._counted(Work(plan.result, plan.name, site))
        if self.state != "live" and self._answer_locally(plan, work):
            return work
        timeout_s = seconds(getattr(opts, "timeout", None), self._timeout)
        job = partial(self._run, plan, work, timeout_s, site)
        if self._is_inline(plan):
            mark_waiting(index, True)
            try:
                job()
            finally:
                mark_waiting(index, False)
        else:
            work.on_wait = partial(mark_waiting, index)
            self._queue.put(job)
        return work

    def _is_inline(self, plan: OperationPlan) -> bool:
        """Whether the operation runs in this thread, now."""
        inline = plan.synchronous and self._queue.idle()
        if not plan.tensors or plan.tensors[0].is_cpu:
            return inline
        if self.backends.serve(plan.tensors[0].device.type):
            return True  # It goes onto the caller's stream, and returns at once.
        if not inline:
            synchronize_stream(plan.tensors[0].device)  # Another thread has another current stream.
        return inline

    def _answer_locally(self, plan: OperationPlan, work: Work) -> bool:
        """Finish without the peers, unless the group is live (G1)."""
        if self.state == "joining" and registry.state.meet is not None:
            registry.state.meet()
        if self.state == "live":
            return False
        latch = registry.state.latch
        if self.state == "joining" or (latch is not None and latch.answers(synchronous=plan.synchronous)):
            with torch.no_grad():
                plan.answer()
            work.finish()
        else:
            work.finish(self.loss)
        return True

    def _run(self, plan: OperationPlan, work: Work, timeout_s: float, site: str = "") -> None:
        try:
            if self._answer_locally(plan, work):
                return
            assert self._transport is not None
            source = self._transport.engine_for(plan.tensors).run(plan, timeout_s, site)
        except (PeerLost, DeadlinePassed) as loss:
            self._trip(loss)
            self._answer_locally(plan, work)
        except BaseException as error:
            work.finish(registry.defer_mismatch(error))
        else:
            if plan.torch_work is not None:
                work.follow(plan.torch_work, partial(self._failed_late, plan))
            work.finish(source=source)

    def _failed_late(self, plan: OperationPlan, error: RuntimeError) -> None:
        """An operation failed after it was issued; raises its loss, unless a latch keeps it."""
        assert plan.explain is not None
        try:
            plan.explain(error)
        except (PeerLost, DeadlinePassed) as loss:
            if not self._trip(loss):
                raise

    def _trip(self, loss: ArgosyError) -> bool:
        """Become lost; True if a latch keeps the loss from a synchronous operation."""
        self.lose(loss)
        if (latch := registry.state.latch) is not None:
            latch.trip(loss)
        return latch is not None and latch.answers(synchronous=True)

    def _counted(self, work: Work) -> Work:
        if (latch := registry.state.latch) is not None:
            latch.issued += 1
        return work

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
        # Torch gives outputs[rank][index], a plan takes outputs[index][rank].
        turned = [list(column) for column in zip(*outputs, strict=True)]
        plan = plans.all_gather(turned, inputs, self.size(), ("allgather_coalesced", (outputs, inputs)))
        return self._issue(plan, opts)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        check_whole("all_gather", output, given, self.size())
        plan = plans.all_gather([output], [given], self.size(), ("all_gather_single", (output, given)))
        return self._issue(plan, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        torch_call = ("all_gather_single_coalesced", (outputs, inputs))
        return self._issue(plans.all_gather(list(outputs), list(inputs), self.size(), torch_call), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        torch_call = ("reduce_scatter", (outputs, inputs, opts))
        return self._issue(
            plans.reduce_scatter(list(outputs), list(inputs), reduction_code(opts), self._place, torch_call), opts
        )

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        check_whole("reduce_scatter", given, output, self.size())
        torch_call = ("reduce_scatter_single", (output, given, opts))
        return self._issue(plans.reduce_scatter([output], [given], reduction_code(opts), self._place, torch_call), opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        torch_call = ("reduce_scatter_single_coalesced", (outputs, inputs, opts))
        return self._issue(
            plans.reduce_scatter(list(outputs), list(inputs), reduction_code(opts), self._place, torch_call), opts
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        own: list[torch.Tensor] = outputs[0] if outputs else []
        torch_call = ("gather", (outputs, inputs, opts))
        return self._issue(plans.gather(own, inputs[0], opts.rootRank, self._place, torch_call), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        given: list[torch.Tensor] = inputs[0] if inputs else []
        torch_call = ("scatter", (outputs, inputs, opts))
        return self._issue(plans.scatter(outputs[0], given, opts.rootRank, self._place, torch_call), opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        check_one_per_rank("all_to_all", "output", outputs, self.size())
        check_one_per_rank("all_to_all", "input", inputs, self.size())
        plan = plans.all_to_all(outputs, inputs, list(outputs), ("alltoall", (outputs, inputs)))
        return self._issue(plan, opts)

    def all_to_all_single(
        self, output: Any, given: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        size = self.size()
        torch_call = ("all_to_all_single", (output, given, output_splits, input_splits))
        whole = output.detach()
        target = whole if whole.is_contiguous() else whole.contiguous()
        outputs = split(target, output_splits, size)
        plan = plans.all_to_all(outputs, split(given.detach().contiguous(), input_splits, size), [output], torch_call)
        if target is not whole:
            plan.after = lambda: whole.copy_(target)
        return self._issue(plan, opts)

    def barrier(self, opts: Any = None) -> Work:
        return self._issue(plans.barrier(("barrier", ())), opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with its own deadline. As for every operation, its error names all ranks that did not arrive."""
        opts = dist.BarrierOptions()
        opts.timeout, opts.asyncOp = timeout or self._timeout, False
        self.barrier(opts).wait()

    def split_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None, **names: Any
    ) -> "Group | None":
        """Make a new group of these ranks of this one, on all of which it is called; None on the other ranks."""
        if self.rank() not in ranks:
            return None
        self._splits += 1  # A second group of the same ranks must not read the first one's keys.
        name = names.get("group_name") or f"{self._name}:{self._splits}:{'-'.join(map(str, ranks))}"
        store, world = dist.PrefixStore(f"{name}/", self._store), [self._ranks[rank] for rank in ranks]
        part = Group(store, list(ranks).index(self.rank()), len(ranks), world, timeout or self._timeout)
        part._set_group_name(name)
        part._set_group_desc(names.get("group_desc") or "undefined")
        return part

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        return self._transfer("send", tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        return self._transfer("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._transfer("recv", tensors, -1, tag)

    def _transfer(self, name: str, tensors: Any, peer: int, tag: int) -> Work:
        index, site = count_collective(self, name, p2p=True)
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        work = self._counted(Work(tensors, name, site))
        work.on_wait = partial(mark_waiting, index)
        method = "recv_anysource" if peer < 0 else name
        plan = plans.point_to_point(name, tensors, (method, (tensors, tag) if peer < 0 else (tensors, peer, tag)))
        if self._answer_locally(plan, work):
            return work
        transport = self._transport
        assert transport is not None
        if transport.engine_for(tensors) is not transport.shared:
            # On a thread of its own: a send must not wait for a receive that was issued after it.
            arguments = (plan, work, self._timeout.total_seconds(), site)
            threading.Thread(target=self._run, args=arguments, daemon=True).start()
            return work
        memory = plans.TensorMemory()
        part = memory.read(tensors[0]) if name == "send" else memory.write(tensors[0])
        message = P2PMessage(peer, tag, part, self._timeout.total_seconds())
        message.site, message.dtype = site, dtype_name(tensors[0].dtype)

        def done(error: BaseException | None) -> None:
            if error is None:
                with torch.no_grad():
                    memory.write_back()
            elif isinstance(error, PeerLost | DeadlinePassed) and self._trip(error):
                error = None
            work.finish(error, message.peer)

        message.done = done
        (transport.p2p().send if name == "send" else transport.p2p().receive)(message)
        return work


hide_from_dynamo(Group, OPERATIONS)
