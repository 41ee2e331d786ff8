"""Stacks of many ranks at once, from outside, without stopping the loop that asks for them.

A rank that was armed writes its own stack on a signal; py-spy reads those that were not, or stay silent;
of stopped and blocked ones the kernel's word is taken. Reading and grouping stacks is in `frames.py`.

S1  The signal goes only to the very process that armed itself: same start time, still catching the signal,
    still holding its stack file open. So it never kills an exec'd program or a reused pid.
S2  `Taking.step` never blocks.
"""

import contextlib
import faulthandler
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from argosy.supervise.evidence.frames import Stack, parse_faulthandler, parse_py_spy
from argosy.supervise.evidence.proc_sample import ProcSample, blocks, catches, read_proc

STACK_SIGNAL = signal.SIGRTMIN + 12
ANSWER_S = 0.2
SETTLE_S = 0.015
SETTLE_MAX_S = 1.0
SPIES_MAX = 8
BEGUN_MAX = 8  # per step, which thus stays short
KILLED_S = 5.0
_FD_MIN = 200  # out of the way of descriptors that a script may count on


class Target(msgspec.Struct, frozen=True):
    """A rank to look into; `start` is its start time in ticks, `stack_file` what `arm` was given."""

    index: int
    pid: int
    start: int
    stack_file: str | None = None


def arm(path: str) -> None:
    """In a rank: from now on write the stacks of all threads to `path` whenever STACK_SIGNAL arrives."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    fd = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _FD_MIN)
    os.close(opened)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)
    # Written last: who reads this line knows that the handler is in place.
    os.write(fd, f"armed fd={fd} main=0x{threading.main_thread().ident or 0:016x}\n".encode())


def take(
    targets: Sequence[Target],
    deadline_s: float = 10.0,
    *,
    native: Iterable[int] = (),
    answer_s: float = ANSWER_S,
) -> dict[int, Stack]:
    """Take the stacks of `targets`; blocks until all have answered, `deadline_s` at most.

    A rank that has not begun to answer for itself after `answer_s` is read by py-spy too.
    """
    taking = Taking(targets, time.monotonic(), deadline_s=deadline_s, native=native, answer_s=answer_s)
    try:
        while not taking.step(time.monotonic()):
            time.sleep(0.002)
    finally:
        taking.close()
    return taking.result()


def find_py_spy() -> str | None:
    """Where py-spy is: beside the interpreter, or on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


class StackTaking(Protocol):
    """Stacks being taken, here or elsewhere."""

    def step(self, now: float) -> bool: ...

    def result(self) -> dict[int, Stack]: ...

    def close(self) -> None: ...


class Taking:
    """Stacks being taken: call `step` until it says True, then `result`. Times are the caller's."""

    def __init__(
        self,
        targets: Sequence[Target],
        now: float,
        *,
        deadline_s: float = 10.0,
        native: Iterable[int] = (),
        answer_s: float = ANSWER_S,
    ) -> None:
        self._ends_at, self._answer_s = now + deadline_s, answer_s
        self._stacks: dict[int, Stack] = {}
        self._answers: list[_Answer] = []
        self._queue: list[_Spy] = []
        self._spies: list[_Spy] = []
        self._py_spy = find_py_spy()
        self._todo = list(targets)
        self._native = frozenset(native)

    def step(self, now: float) -> bool:
        """Go on, see what has arrived; True when there is nothing left to wait for."""
        begun, self._todo = self._todo[:BEGUN_MAX], self._todo[BEGUN_MAX:]
        for target in begun:
            self._begin(target, now, native=target.index in self._native)
        for answer in [a for a in self._answers if a.settled(now)]:
            self._finish(answer.target.index, answer.read())
        asked = {spy.target.index for spy in self._queue + self._spies}
        for answer in list(self._answers):  # a late answer still counts, whichever comes first
            if answer.silent(now, self._answer_s) and answer.target.index not in asked:
                self._ask_py_spy(answer.target, answer.proc)
        for spy in [s for s in self._spies if s.ended()]:
            self._spies.remove(spy)
            self._finish(spy.target.index, spy.read())
        while self._queue and len(self._spies) < SPIES_MAX:
            spy = self._queue.pop(0)
            try:
                spy.start()
                self._spies.append(spy)
            except OSError as error:
                note = f"py-spy could not be started: {error.strerror}"
                self._finish(spy.target.index, Stack("proc", proc=spy.proc, note=note))
        if now >= self._ends_at:
            self.close()
        return not (self._todo or self._answers or self._queue or self._spies)

    def result(self) -> dict[int, Stack]:
        """What is known so far, by rank."""
        return dict(sorted(self._stacks.items()))

    def close(self) -> None:
        """End what still runs; those ranks get what the kernel says of them."""
        for pending in [*self._answers, *self._queue, *self._spies]:
            self._finish(pending.target.index, Stack("proc", proc=pending.proc, note="no answer in time"))
        for target in self._todo:
            self._finish(target.index, Stack("proc", note="no time was left"))
        self._todo = []

    def _begin(self, target: Target, now: float, *, native: bool) -> None:
        proc = read_proc(target.pid)
        if proc is not None and proc.state in "TtD":  # of those that answer for themselves it is not needed
            proc = read_proc(target.pid, deep=True)
        if proc is None or proc.start != target.start or proc.state in "ZX":
            self._finish(target.index, Stack("proc", note="the process is gone"))
        elif proc.state in "Tt" or native:
            self._ask_py_spy(target, proc, native=native)
        else:
            answer = _Answer(target, proc, now)
            if answer.ask():
                self._answers.append(answer)
            else:
                self._ask_py_spy(target, proc)

    def _ask_py_spy(self, target: Target, proc: ProcSample, *, native: bool = False) -> None:
        if proc.state == "D":  # a debugger would block together with it
            self._finish(target.index, Stack("proc", proc=proc, note="in an uninterruptible system call"))
        elif self._py_spy is None:
            note = "no stack: py-spy is not installed; pip install py-spy"
            self._finish(target.index, Stack("proc", proc=proc, note=note))
        else:
            self._queue.append(_Spy(self._py_spy, target, proc, native))

    def _finish(self, index: int, stack: Stack) -> None:
        """Keep the answer, and stop waiting for another one of the same rank."""
        self._stacks[index] = stack
        for spy in [spy for spy in self._spies if spy.target.index == index]:
            self._spies.remove(spy)
            spy.kill()
        self._queue = [spy for spy in self._queue if spy.target.index != index]
        self._answers = [answer for answer in self._answers if answer.target.index != index]


class _Answer:
    """A rank that was sent the signal, and the file that it will write to."""

    def __init__(self, target: Target, proc: ProcSample, now: float) -> None:
        self.target, self.proc = target, proc
        self._main = 0
        self._offset = self._size = 0
        self._asked_at = self._size_at = now

    def ask(self) -> bool:
        """Send the signal if the rank is armed (S1)."""
        path = self.target.stack_file
        if path is None:
            return False
        try:
            with open(path, "rb") as file:
                head = dict(word.split("=", 1) for word in file.readline().decode().split()[1:])
            held = os.stat(f"/proc/{self.target.pid}/fd/{int(head['fd'])}")
            here = os.stat(path)
            pidfd = os.pidfd_open(self.target.pid)
        except (OSError, ValueError, KeyError):
            return False
        try:
            proc = read_proc(self.target.pid)  # again: the pidfd now pins this process
            same = proc is not None and proc.start == self.target.start
            if not same or not os.path.samestat(held, here) or not catches(self.target.pid, STACK_SIGNAL):
                return False
            self._main, self._offset, self._size = int(head["main"], 16), here.st_size, here.st_size
            signal.pidfd_send_signal(pidfd, STACK_SIGNAL)
        except (OSError, ValueError, KeyError):
            return False
        finally:
            os.close(pidfd)
        return True

    def silent(self, now: float, answer_s: float) -> bool:
        """Whether it should have answered by now and has not begun to."""
        return self._size == self._offset and now - self._asked_at >= answer_s

    def settled(self, now: float) -> bool:
        """Whether the file grew and then rested: faulthandler writes line by line, without an end mark.

        A rank that waits for a core in the middle of it has not come to the main thread, or still handles the signal,
        unless it blocks that: then another of its threads writes.
        """
        try:
            written = self._written()
        except OSError:
            return False
        size = self._offset + len(written)
        if size != self._size:
            self._size, self._size_at = size, now
        if self._size == self._offset or now - self._size_at < SETTLE_S:
            return False
        last = f"0x{self._main:016x}".encode(), b"\n...\n"  # the main thread, or that there are over 100 threads
        if not any(mark in written for mark in last):
            return False
        return now - self._size_at >= SETTLE_MAX_S or not blocks(self.target.pid, STACK_SIGNAL)

    def read(self) -> Stack:
        try:
            text = self._written().decode(errors="replace")
        except OSError as error:
            return Stack("proc", proc=self.proc, note=f"no stack: {error.strerror}")
        return Stack("faulthandler", threads=parse_faulthandler(text, main=self._main), proc=self.proc)

    def _written(self) -> bytes:
        with open(self.target.stack_file or "", "rb") as file:
            file.seek(self._offset)
            return file.read()


class _Spy:
    """A py-spy that reads one rank."""

    def __init__(self, program: str, target: Target, proc: ProcSample, native: bool) -> None:
        self.target, self.proc, self._native = target, proc, native
        self._argv = [program, "dump", "--json", "--pid", str(target.pid)]
        if native:
            self._argv.append("--native")
        elif proc.state in "Tt":  # it must not wait for the rank to stop, nor set it going again
            self._argv.append("--nonblocking")
        self._process: subprocess.Popen[bytes] | None = None
        self._out = self._err = -1

    def start(self) -> None:
        # Memory files, not pipes: nobody has to read while it writes, and a full disk does not matter.
        self._out = os.memfd_create("py-spy-out")
        environment = {"PATH": os.defpath, "RUST_BACKTRACE": "0"}
        try:
            self._err = os.memfd_create("py-spy-err")
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, env=environment
            )
        except OSError:
            for fd in (self._out, self._err):
                if fd >= 0:
                    os.close(fd)
            raise

    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """End it; a thread waits for that."""
        if self._process is not None:
            self._process.kill()
            threading.Thread(target=self._bury, args=(self._process,), daemon=True).start()

    def _bury(self, process: "subprocess.Popen[bytes]") -> None:
        """A tracer that dies at the wrong moment leaves the rank stopped, so set that going again."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        self._contents()
        proc = read_proc(self.target.pid)
        if self.proc.state not in "Tt" and proc is not None and proc.start == self.target.start:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.target.pid, signal.SIGCONT)

    def read(self) -> Stack:
        text, trouble = self._contents()
        threads = parse_py_spy(text, pid=self.target.pid)
        if threads:
            return Stack("py-spy", threads=threads, proc=self.proc, native=self._native)
        lines = [line for line in trouble.decode(errors="replace").splitlines() if line.strip()]
        reason = lines[0].removeprefix("Error: ") if lines else "no Python threads"
        return Stack("proc", proc=self.proc, note=f"py-spy: {reason}")

    def _contents(self) -> tuple[bytes, bytes]:
        """What it wrote, read once; closes the files."""
        with open(self._out, "rb") as out, open(self._err, "rb") as err:
            out.seek(0)
            err.seek(0)
            return out.read(), err.read()
