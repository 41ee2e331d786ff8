"""What calls give back: a reply, or the replies of several ranks; waited for, awaited, streamed or reduced."""

import asyncio
import contextlib
import select
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

from argosy.core import ArgosyError, DeadlinePassed, PeerLost
from argosy.fabric import CANCELLED, LATE, RAISED, PendingCall, ReplyFrame, rebuild

T = TypeVar("T")
Resend = Callable[[int], PendingCall]


class Reply(Generic[T]):
    """The reply of one rank to one call."""

    __slots__ = ("_began", "_deadline", "_pending", "_resend", "_retries", "_value", "rank")

    def __init__(
        self, rank: int, pending: PendingCall, deadline: float, resend: Resend | None = None, retries: int = 0
    ) -> None:
        self.rank = rank
        self._pending, self._deadline, self._resend, self._retries = pending, deadline, resend, retries
        self._began = time.monotonic()

    def get(self, timeout_s: float | None = None) -> T:
        """Wait for the result.

        Raises:
            whatever the endpoint raised, with a note that holds the remote traceback and the rank.
            PeerLost: the rank is gone; the cause says how.
            DeadlinePassed: the deadline of the call has passed (the callee is told to stop), or `timeout_s` has.
        """
        until = 0.0 if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if not self._pending.done:
                self._wait(until)
            if not self._again():
                return self._result()

    @property
    def is_done(self) -> bool:
        """Whether `get` would return or raise at once."""
        return self._pending.done and not self._is_to_be_made_again

    @property
    def _is_to_be_made_again(self) -> bool:
        return bool(self._retries) and self._resend is not None and isinstance(self._pending.error, PeerLost)

    def _again(self) -> bool:
        """Make the call again, if its rank is lost and that is wanted."""
        if not self._is_to_be_made_again:
            return False
        assert self._resend is not None
        self._retries -= 1
        self._pending = self._resend(self.rank)
        return True

    def cancel(self) -> bool:
        """Give the call up and stop it at the callee; False if it was over before."""
        peer = self._pending.peer
        return peer.cancel(self._pending, ArgosyError(f"the call to {peer.name} was cancelled by its caller"))

    def __await__(self) -> Generator[Any, None, T]:
        yield from self._settled().__await__()
        return self.get()

    # --- waiting

    def _wait(self, until: float) -> None:
        pending, deadline = self._pending, self._deadline
        first = min(until or deadline, deadline or until)
        try:
            if pending.peer.wait(pending, first):
                return
        except BaseException:  # An interrupt: nobody waits any more, so nobody shall work for it.
            self.cancel()
            raise
        if deadline and time.monotonic() >= deadline:
            self._expire()
        else:
            raise DeadlinePassed(f"a reply of {pending.peer.name}", until - self._began, hint="the call goes on")

    def _expire(self) -> None:
        peer = self._pending.peer
        hint = peer.explain_silence()
        error = DeadlinePassed(f"a reply of {peer.name}", self._deadline - self._began, hint=hint)
        error.add_note(hint)
        peer.cancel(self._pending, error)

    async def _settled(self) -> None:
        """Wait on an event loop until the pending is done."""
        pending, loop = self._pending, asyncio.get_running_loop()
        done = asyncio.Event()
        pending.on_done = lambda: cast(None, loop.call_soon_threadsafe(done.set))
        watched = pending.peer.watch(loop)
        try:
            while not pending.done:
                left = self._deadline - time.monotonic() if self._deadline else 1.0
                if left <= 0:
                    await asyncio.to_thread(self._expire)
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, 1.0)):
                        await done.wait()
                if not pending.done:
                    pending.peer.check_alive()
            if self._retries and isinstance(pending.error, PeerLost):
                with contextlib.suppress(Exception):  # What it raises, `get` raises again.
                    await asyncio.to_thread(self.get)  # Waits for the replacement.
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            pending.on_done = None  # The loop may be closed when somebody else settles it.
            pending.peer.unwatch(loop, watched)

    def _result(self) -> T:
        pending = self._pending
        if pending.error is not None:
            raise pending.error
        frame = pending.frame
        assert frame is not None
        assert isinstance(frame.message, ReplyFrame)
        kind = frame.message.kind
        if kind == LATE:
            raise DeadlinePassed(f"the turn of a call to {pending.peer.name}", self._deadline - self._began)
        if kind == CANCELLED:
            raise ArgosyError(f"the call to {pending.peer.name} was cancelled")
        if not frame.taken:
            self._value: Any = frame.take()
        if kind == RAISED:
            raise rebuild(self._value, pending.peer.name)
        return self._value


class Replies(Generic[T]):
    """The replies of several ranks to one call."""

    def __init__(self, replies: Sequence[Reply[T]]) -> None:
        self._replies = list(replies)

    def gather(self, timeout_s: float | None = None) -> list[T]:
        """All results, in the order of the ranks. Raises what the first failed rank raised, when all have ended.

        With `timeout_s` it may raise `DeadlinePassed` before that; the calls go on.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._settle(until)
        results: list[T] = []
        failed: BaseException | None = None
        for position, reply in enumerate(self._replies):
            try:
                results.append(reply.get(None if until is None else max(0.0, until - time.monotonic())))
            except Exception as error:
                failed = failed or error
            except BaseException:
                for other in self._replies[position + 1 :]:
                    other.cancel()
                raise
        if failed is not None:
            raise failed
        return results

    def outcomes(self) -> list[T | Exception]:
        """Per rank its result or what it raised, in the order of the ranks."""
        self._settle(None)
        outcomes: list[T | Exception] = []
        for reply in self._replies:
            try:
                outcomes.append(reply.get())
            except Exception as error:
                outcomes.append(error)
        return outcomes

    def _settle(self, until: float | None) -> None:
        """Make calls of lost ranks again as soon as they are lost: the others may be waiting for those ranks."""
        waiting = [reply for reply in self._replies if reply._retries]  # pyright: ignore[reportPrivateUsage]
        try:
            while waiting and (until is None or time.monotonic() < until):
                _wait_for_any(waiting)
                waiting = [reply for reply in waiting if not reply.is_done]
        except BaseException:
            self.cancel()
            raise

    def stream(self) -> Iterator[Reply[T]]:
        """The replies as they come; `get` of each returns or raises at once."""
        waiting = list(self._replies)
        while waiting:
            done = [reply for reply in waiting if reply.is_done]
            for reply in done:
                waiting.remove(reply)
                yield reply
            if waiting and not done:
                _wait_for_any(waiting)

    def reduce(self, combine: Callable[[T, T], T]) -> T:
        """Combine the results two by two, each as soon as it comes, so that they are never all held."""
        total: list[T] = []
        for reply in self.stream():
            value = reply.get()
            total[:] = [combine(total[0], value)] if total else [value]
        return total[0]

    def cancel(self) -> None:
        """Give all calls up."""
        for reply in self._replies:
            reply.cancel()

    def __iter__(self) -> Iterator[Reply[T]]:
        return iter(self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._all().__await__()

    async def _all(self) -> list[T]:
        await asyncio.gather(*(reply._settled() for reply in self._replies))  # pyright: ignore[reportPrivateUsage]
        return self.gather()


def _wait_for_any(replies: Sequence[Reply[Any]]) -> None:
    """Wait until bytes came for one of them, or a second has passed, and read; calls of lost ranks are made again."""
    for reply in replies:
        reply._again()  # pyright: ignore[reportPrivateUsage]
    pendings = [reply._pending for reply in replies]  # pyright: ignore[reportPrivateUsage]
    peers = {pending.peer for pending in pendings}
    poller = select.poll()
    for peer in peers:
        sock = peer.sock
        if sock is not None and sock.fileno() >= 0:
            poller.register(sock, select.POLLIN)
    ready = poller.poll(1000)
    for peer in peers:
        peer.read_now()
        if not ready:
            peer.check_alive()
    for reply in replies:
        deadline = reply._deadline  # pyright: ignore[reportPrivateUsage]
        if deadline and not reply.is_done and time.monotonic() >= deadline:
            reply._expire()  # pyright: ignore[reportPrivateUsage]
