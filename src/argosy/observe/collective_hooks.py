"""Hooks on torch.distributed that count every collective of a rank on its progress page.

From torch 2.15 on, a hook of the group is called before each operation, whoever issues it: Python, DDP's reducer,
functional and compiled collectives. The methods of ProcessGroup only remember the Work that a call returns. Groups
that are written in Python (Argosy's own) have no such hook, and count themselves.

Older torch needs two layers, because neither sees everything: the methods of ProcessGroup see every call from Python,
and the dispatcher hook (key ADInplaceOrView of each c10d operator) sees what C++ issues. It costs five times as much
(70 us against 14 us), so the methods disable it for their own calls. A wait inside C++ is not seen in either case.

C1  If a hook fails, the operator runs as without it, and raises only its own errors.
C2  The original is called through the dispatcher, which releases the GIL. (Calling a kernel taken from the operator
    keeps the GIL inside C++ and deadlocks DDP on Gloo.)
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial, wraps
from time import perf_counter_ns
from typing import Any, cast

from argosy.observe.call_site import call_site
from argosy.observe.dynamo_skip import skip_dynamo
from argosy.observe.governor import DETAIL, Governor
from argosy.observe.page import Page
from argosy.observe.progress import P2P_OPS
from argosy.observe.rank_journal import rank_journal
from argosy.observe.spans import ring

_DISPATCH_KEY = "ADInplaceOrView"
_HOOK_ID = 0x4152474F
_WORKS_MAX = 1024


def _by_name(names_of: dict[str, str]) -> dict[str, str]:
    return {name: op for op, names in names_of.items() for name in names.split()}


_OPERATORS = _by_name(
    {
        "all_gather": "_allgather_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_",
        "all_reduce": "allreduce_ allreduce_coalesced_",
        "all_to_all": "alltoall_ alltoall_base_",
        "barrier": "barrier monitored_barrier_",
        "broadcast": "broadcast_",
        "gather": "gather_",
        "recv": "recv_ recv_any_source_",
        "reduce": "reduce_",
        "reduce_scatter": "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_",
        "scatter": "scatter_",
        "send": "send",
    }
)
"""The operators of c10d, by name."""

_METHODS = _by_name(
    {
        "all_gather": "_allgather_base all_gather_single all_gather_single_coalesced allgather allgather_coalesced "
        "allgather_into_tensor_coalesced",
        "all_reduce": "allreduce allreduce_coalesced",
        "all_to_all": "all_to_all_single alltoall alltoall_base",
        "barrier": "barrier monitored_barrier",
        "broadcast": "broadcast",
        "gather": "gather",
        "recv": "recv recv_anysource",
        "reduce": "reduce",
        "reduce_scatter": "_reduce_scatter_base reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced "
        "reduce_scatter_tensor_coalesced",
        "scatter": "scatter",
        "send": "send",
    }
)
"""The methods of ProcessGroup, by name. Older names are included, because scripts may use any torch."""


BYTES_MAX = 0xFFFFFFFF


class _Tally:
    """Numbers the operations of one group; point-to-point operations have no number that the members share."""

    def __init__(self, group: int) -> None:
        self._group, self._issued, self.newest = (group & 0xFF) << 56, 0, 0

    def issue(self, size: int, p2p: bool) -> int:
        """The argument of the operation's record: group (8 bits), number (24 bits, 0: none), bytes (32 bits)."""
        if not p2p:
            self._issued = self._issued + 1 & 0xFFFFFF or 1
        self.newest = self._group | (0 if p2p else self._issued) << 32 | min(size, BYTES_MAX)
        return self.newest


def bytes_of(arguments: Iterable[Any]) -> int:
    """The bytes of the largest argument, which may be a tensor or a list of tensors, one level nested."""
    largest = 0
    for argument in arguments:
        nbytes: int | None = getattr(argument, "nbytes", None)
        if nbytes is None and isinstance(argument, (list, tuple)):
            parts = cast("list[Any]", argument)
            nbytes = sum(
                bytes_of(cast("list[Any]", each)) if isinstance(each, list) else getattr(each, "nbytes", 0)
                for each in parts
            )
        if nbytes is not None and nbytes > largest:
            largest = nbytes
    return largest


class CollectiveHooks:
    """Counts the collectives of this process on a page, which may be replaced at any time."""

    def __init__(self) -> None:
        self._page = Page.void()
        self._groups: dict[int, int] = {}
        self._works: dict[int, tuple[int, int]] = {}
        self._last = 0
        self._tallies: dict[int, _Tally] = {}
        self._governor = Governor()
        self._added = 0
        self._hooked: set[int] = set()
        """Groups with a hook of torch's, by id."""
        self._hook_ops: dict[Any, tuple[bytes, bool]] = {}
        self._plain_group: type | None = None
        self._below: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._library: Any = None
        self.backward_site = b""
        """Where the last backward pass began: the call site of collectives that autograd's own threads issue."""

    def attach(self, page: Page) -> None:
        self._groups, self._works, self._page, self._tallies, self._added = {}, {}, page, {}, 0
        self._hooked, self._governor = set(), Governor()

    def install(self, torch: Any, c10d: Any) -> None:
        """Patch torch, skipping what this version of torch does not have."""
        with suppress(Exception):
            if hasattr(c10d.ProcessGroup, "register_pre_hook"):
                self._find_hook_ops(torch, c10d)
            else:
                self._patch_operators(torch, c10d)
        for patch in (self._patch_formation, self._patch_methods, self._patch_wait):
            with suppress(Exception):
                patch(c10d)
        with suppress(Exception):
            for group in list(c10d._world.pg_map):  # Formed before the hooks were installed.
                self._add_existing(group)
        for hooked in (c10d.ProcessGroup.allreduce, c10d.Work.wait):  # All methods share the code of one.
            skip_dynamo(torch, hooked, callees=True)

    # -- counting ----------------------------------------------------------------------------------

    def count(self, group: Any, op: bytes, p2p: bool, tensors: Iterable[Any] = ()) -> tuple[int, bytes]:
        """Count an operation; returns the group's slot and the call site."""
        index = self._groups.get(id(group))
        if index is None:
            index = self._add_existing(group)
        return index, self._count(index, op, p2p, tensors)

    def _count(self, index: int, op: bytes, p2p: bool, tensors: Iterable[Any]) -> bytes:
        """Returns the call site, if this step is recorded in full."""
        began, records, governor = perf_counter_ns(), ring(), self._governor
        if governor.see(records.step, began):
            records.counter(DETAIL, governor.every)
        site = (call_site() or self.backward_site) if governor.full else b""
        self._page.issue(index, op, site, p2p)
        self._last = index
        tally = self._tallies.get(index)
        if tally is not None:
            argument = tally.issue(bytes_of(tensors) if governor.full else 0, p2p)
            if governor.full:
                records.point(op.decode(), None, argument)
        governor.add(perf_counter_ns() - began)
        return site

    def begin_wait(self, index: int, argument: int = -1) -> None:
        """Record that this rank blocks; without `argument`, in the newest operation of the group."""
        self._page.wait(index)
        tally = self._tallies.get(index)
        ring().begin("wait", None, argument if argument >= 0 else tally.newest if tally else 0)

    def end_wait(self, index: int) -> None:
        self._page.waited(index)
        ring().end("wait")

    def _add_existing(self, group: Any) -> int:
        """Give a slot to a group that was formed before the hooks were installed."""
        import torch.distributed as dist

        ranks: list[int] | None = None
        with suppress(Exception):
            ranks = dist.get_process_group_ranks(group)
        return self._add(group, group.size(), group.rank(), ranks)

    def _add(self, group: Any, size: int, rank: int, ranks: list[int] | None) -> int:
        # By id: a reference would keep the threads of a destroyed group alive. A new group at the same address
        # is added by `_patch_formation`.
        index = self._page.add_group(str(group.group_name), size, rank, progression(ranks))
        self._groups[id(group)] = index
        self._hook(group, index)
        self._tallies[index] = _Tally(self._added)
        spread = progression(ranks)
        span = [] if spread is None else [spread.start, spread.stop, spread.step]
        members = ranks if spread is None else None
        rank_journal.write(
            "group",
            number=self._added,
            name=str(group.group_name),
            size=size,
            group_rank=rank,
            span=span,
            members=members,
        )
        self._added += 1
        return index

    # -- patches -----------------------------------------------------------------------------------

    def _find_hook_ops(self, torch: Any, c10d: Any) -> None:
        names = torch._C._distributed_c10d.HookOpName
        for name, op in _OPERATORS.items():  # `_allgather_base_` is ALLGATHER_BASE there.
            hook_op = getattr(names, name.strip("_").upper(), None)
            if hook_op is not None:
                self._hook_ops[hook_op] = op.encode(), op in P2P_OPS
        self._plain_group = c10d.ProcessGroup

    def _hook(self, group: Any, index: int) -> None:
        """Be called by torch before each operation of the group, if it is one of torch's own."""
        self._hooked.discard(id(group))
        if type(group) is not self._plain_group:
            return

        def issued(what: Any) -> None:
            try:
                op, p2p = self._hook_ops[what.name]
                self._count(index, op, p2p, (what.input_tensors, what.output_tensors))
            except Exception:
                pass

        with suppress(Exception):
            group.register_pre_hook(_HOOK_ID, issued)
            self._hooked.add(id(group))

    def _patch_formation(self, c10d: Any) -> None:
        original = c10d._new_process_group_helper

        @wraps(original)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            with suppress(Exception):
                group, (size, rank, ranks) = made[0], args[:3]
                if isinstance(group, c10d.ProcessGroup):
                    self._add(group, size, rank, ranks or list(range(size)))
            return made

        c10d._new_process_group_helper = new_group

    def _patch_methods(self, c10d: Any) -> None:
        for name, op in _METHODS.items():
            original = getattr(c10d.ProcessGroup, name, None)
            if original is not None:
                setattr(c10d.ProcessGroup, name, self._method(original, op))

    def _method(self, original: Callable[..., Any], op: str) -> Callable[..., Any]:
        raw, p2p, below = op.encode(), op in P2P_OPS, self._below

        @wraps(original)
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            index = -1
            if id(group) in self._hooked:
                work = original(group, *args, **kwargs)
                index = self._last
            else:
                try:  # noqa: SIM105 (suppress costs 0.3 us)
                    index, _ = self.count(group, raw, p2p, args)
                except Exception:
                    pass
                with below():
                    work = original(group, *args, **kwargs)
            if index >= 0:
                if len(self._works) >= _WORKS_MAX:  # The script does not wait for them.
                    self._works.clear()
                tally = self._tallies.get(index)
                self._works[id(work)] = index, tally.newest if tally else -1
            return work

        return method

    def _patch_wait(self, c10d: Any) -> None:
        original = c10d.Work.wait

        @wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            index, argument = self._works.pop(id(work), (self._last, -1))
            self.begin_wait(index, argument)
            try:
                return original(work, *args, **kwargs)
            finally:
                self.end_wait(index)

        c10d.Work.wait = wait

    def _patch_operators(self, torch: Any, c10d: Any) -> None:
        key = getattr(torch._C.DispatchKey, _DISPATCH_KEY)
        below = partial(torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(key))
        with below():  # Raises if this torch has no such guard: then the operators are not patched.
            self._below = below
        library = torch.library.Library("c10d", "IMPL")
        for name, op in _OPERATORS.items():
            with suppress(Exception):
                overload = getattr(torch.ops.c10d, name).default
                hook = self._operator(overload, op, c10d.ProcessGroup.unbox)
                skip_dynamo(torch, hook, callees=True)
                library.impl(name, hook, _DISPATCH_KEY)
        self._library = library  # Keeps the registrations alive.

    def _operator(self, overload: Any, op: str, unbox: Any) -> Callable[..., Any]:
        position = [argument.name for argument in overload._schema.arguments].index("process_group")
        raw, p2p, below = op.encode(), op in P2P_OPS, self._below

        def operator(*args: Any, **kwargs: Any) -> Any:
            try:  # noqa: SIM105 (suppress costs 0.3 us)
                self.count(unbox(args[position]), raw, p2p, args)
            except Exception:
                pass
            with below():
                return overload(*args, **kwargs)

        return operator


def progression(ranks: list[int] | None) -> range | None:
    """Return `ranks` as a range, or None if they are not an ascending arithmetic progression."""
    if not ranks:
        return None
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step <= 0:
        return None
    spread = range(ranks[0], ranks[0] + step * len(ranks), step)
    return spread if list(spread) == list(ranks) else None
