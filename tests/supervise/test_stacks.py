"""Stacks of real processes that sleep, compute in C, wait in Gloo, or are stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import PATIENCE_S, until

from argosy.supervise.evidence.frames import Frame, Stack, Thread, group_stacks, parse_faulthandler, place, stacks_text
from argosy.supervise.evidence.proc_sample import catches, read_proc
from argosy.supervise.evidence.stacks import STACK_SIGNAL, Taking, Target
from argosy.supervise.evidence.stacks import take as take_now

SOURCE = str(Path(__file__).parents[2] / "src")
ARMED = "import sys; from argosy.supervise.evidence.stacks import arm; arm(sys.argv[1])\n"

SLEEPS = """
import time
def load():
    print("ready", flush=True); time.sleep(600)  # one line: a stack taken now shows no other
load()
"""
IN_C = """
def multiply():
    print("ready", flush=True); return 7 ** 40_000_000  # one call that holds the GIL for minutes
multiply()
"""
MANY_THREADS = """
import threading, time
def down(depth):
    down(depth - 1) if depth else time.sleep(600)
for _ in range(40):
    threading.Thread(target=down, args=(60,), daemon=True).start()
print("ready", flush=True); time.sleep(600)  # one line: a stack taken now shows no other
"""
IN_GLOO = """
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=sys.argv[3])
dist.all_reduce(torch.ones(1))
print("ready", flush=True)
def sync():
    dist.all_reduce(torch.ones(1))
def read_batch():
    import time
    time.sleep(600)
sync() if rank == 0 else read_batch()
"""


def take(targets: list[Target], *, answer_s: float = PATIENCE_S, native: tuple[int, ...] = ()) -> dict[int, Stack]:
    """As a machine does that is not in a hurry: a rank that waits for a core is not taken for a silent one."""
    return take_now(targets, PATIENCE_S, answer_s=answer_s, native=native)


class Ranks:
    """Processes for one test, ended with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []
        self.scripts: list[str] = []

    def start(self, body: str, *arguments: str, armed: bool = True) -> Target:
        index = len(self.processes)
        text = (ARMED if armed else "import sys\n") + body
        if text not in self.scripts:
            self.scripts.append(text)
            (self.directory / f"script{len(self.scripts) - 1}.py").write_text(text)
        script = self.directory / f"script{self.scripts.index(text)}.py"
        stack_file = str(self.directory / f"stack{index}")
        process = subprocess.Popen(
            [sys.executable, str(script), stack_file, *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": SOURCE, "GLOO_SOCKET_IFNAME": "lo"},
        )
        self.processes.append(process)
        sample = read_proc(process.pid)
        assert sample is not None
        return Target(index, process.pid, sample.start, stack_file)

    def wait_ready(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.end()


def wait_for_state(pid: int, state: str) -> None:
    until(lambda: (sample := read_proc(pid)) is not None and sample.state == state, f"state {state} of {pid}")


def test_eight_sleeping_ranks_are_one_group(ranks: Ranks):
    targets = [ranks.start(SLEEPS) for _ in range(8)]
    ranks.wait_ready()
    ((together, stack),) = group_stacks(take(targets))
    assert (together, stack.source, place(stack)) == (list(range(8)), "faulthandler", "script0.py:5 in load")
    assert [process.poll() for process in ranks.processes] == [None] * 8


def test_the_odd_rank_stands_apart_whatever_its_stack_was_taken_with(ranks: Ranks):
    targets = [ranks.start(SLEEPS), ranks.start(SLEEPS), ranks.start(IN_C), ranks.start(SLEEPS)]
    ranks.wait_ready()
    targets[1] = Target(1, targets[1].pid, targets[1].start)  # as if it had not been armed: py-spy
    groups = group_stacks(take(targets))
    assert [(together, place(stack)) for together, stack in groups] == [
        ([0, 1, 3], "script0.py:5 in load"),
        ([2], "script1.py:4 in multiply"),
    ]


def test_a_rank_inside_one_long_c_call_answers(ranks: Ranks):
    target = ranks.start(IN_C)
    ranks.wait_ready()
    stack = take([target])[0]
    assert stack.source == "faulthandler"
    assert place(stack) == "script0.py:4 in multiply"


@pytest.mark.system
def test_ranks_in_gloo_show_who_waits_and_who_does_not(ranks: Ranks):
    pytest.importorskip("torch")
    store = f"file://{ranks.directory}/store"
    targets = [ranks.start(IN_GLOO, str(rank), store) for rank in range(2)]
    ranks.wait_ready()
    deadline = time.monotonic() + PATIENCE_S
    places = ["", ""]
    stacks = take(targets)
    while places != ["script0.py:9 in sync", "script0.py:12 in read_batch"] and time.monotonic() < deadline:
        time.sleep(0.05)
        stacks = take(targets)
        places = [place(stack) for stack in stacks.values()]
    assert places == ["script0.py:9 in sync", "script0.py:12 in read_batch"]
    assert any("torch/distributed" in frame.file for frame in stacks[0].frames)
    ranks.processes[1].kill()
    assert ranks.processes[0].wait(PATIENCE_S) != 0, "the signal left the waiting rank able to see its peer die"


@pytest.mark.system
def test_a_rank_that_waits_for_a_core_in_the_middle_of_its_answer_is_read_to_its_end(ranks: Ranks):
    core = min(os.sched_getaffinity(0))
    target = ranks.start(MANY_THREADS)
    ranks.wait_ready()
    os.sched_setaffinity(target.pid, {core})
    for thread in os.listdir(f"/proc/{target.pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)
        os.sched_setaffinity(int(thread), {core})
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(burner.pid, {core})
    try:
        for _ in range(3):
            stack = take([target])[0]
            assert [frame.line for frame in stack.frames] == [MANY_THREADS.count("\n") + 1], stack
    finally:
        burner.kill()
        burner.wait()


def test_a_stopped_rank_is_read_without_being_woken(ranks: Ranks):
    target = ranks.start(SLEEPS)
    ranks.wait_ready()
    os.kill(target.pid, signal.SIGSTOP)
    wait_for_state(target.pid, "T")
    stack = take([target])[0]
    assert stack.source == "py-spy"
    assert stack.proc is not None
    assert stack.proc.state == "T"
    assert place(stack) == "script0.py:5 in load"
    sample = read_proc(target.pid)
    assert sample is not None
    assert sample.state == "T"


def test_a_rank_that_was_never_armed_is_read_by_py_spy(ranks: Ranks):
    target = ranks.start(SLEEPS, armed=False)
    ranks.wait_ready()
    stack = take([target])[0]
    assert (stack.source, place(stack)) == ("py-spy", "script0.py:5 in load")
    assert ranks.processes[0].poll() is None


def test_s1_a_program_exec_ed_by_an_armed_rank_does_not_die_of_the_signal(ranks: Ranks):
    target = ranks.start("""
import os
print("ready", flush=True)
os.execvp("sleep", ["sleep", "600"])
""")
    ranks.wait_ready()
    until(lambda: Path(f"/proc/{target.pid}/comm").read_text() == "sleep\n", "the program")
    stack = take([target])[0]
    assert stack.source == "proc"
    assert stack.note.startswith("py-spy: ")
    assert ranks.processes[0].poll() is None


def test_s1_a_rank_that_closed_its_stack_file_is_not_signalled(ranks: Ranks):
    target = ranks.start("import os; os.closerange(3, 4096)\n" + SLEEPS)
    ranks.wait_ready()
    assert catches(target.pid, STACK_SIGNAL)
    assert take([target])[0].source == "py-spy"


def test_s1_another_process_with_the_same_pid_is_left_alone(ranks: Ranks):
    target = ranks.start(SLEEPS)
    ranks.wait_ready()
    stack = take([Target(0, target.pid, target.start - 1, target.stack_file)])[0]
    assert stack.note == "the process is gone"
    assert Path(target.stack_file or "").read_text().count("\n") == 1


def test_a_silent_rank_is_asked_through_py_spy(ranks: Ranks):
    target = ranks.start("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 12])\n" + SLEEPS)
    ranks.wait_ready()
    stack = take([target], answer_s=0.2)[0]
    assert (stack.source, place(stack)) == ("py-spy", "script0.py:7 in load")


def test_a_silent_rank_that_py_spy_cannot_read_gets_the_kernel_s_word(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    target = ranks.start("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 12])\n" + SLEEPS)
    ranks.wait_ready()
    failing = tmp_path / "py-spy"
    failing.write_text(f"#!/bin/sh\necho tried >> {tmp_path}/tries\necho 'Error: not permitted' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    stack = take([target], answer_s=0.2)[0]
    assert (stack.source, stack.note) == ("proc", "py-spy: not permitted")
    assert (tmp_path / "tries").read_text() == "tried\n"


def test_without_py_spy_the_remedy_is_named(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    target = ranks.start(SLEEPS, armed=False)
    ranks.wait_ready()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert take([target])[0].note == "no stack: py-spy is not installed; pip install py-spy"


def test_native_frames_of_one_rank_on_request(ranks: Ranks):
    target = ranks.start(SLEEPS)
    ranks.wait_ready()
    stack = take([target], native=(0,))[0]
    assert stack.native
    assert any("libc" in frame.file or "sleep" in frame.function for frame in stack.frames)
    assert place(stack) == "script0.py:5 in load"


def test_a_dead_rank_is_said_to_be_gone(ranks: Ranks):
    target = ranks.start(SLEEPS)
    ranks.wait_ready()
    ranks.processes[0].kill()
    ranks.processes[0].wait()
    assert take([target])[0].note == "the process is gone"


def test_s2_a_step_never_blocks_and_the_deadline_ends_what_is_left(ranks: Ranks):
    target = ranks.start(SLEEPS, armed=False)
    ranks.wait_ready()
    taking = Taking([target], 0.0, deadline_s=5.0)
    assert not taking.step(0.0)
    assert taking.step(5.0)
    assert taking.result()[0].note == "no answer in time"
    wait_for_state(target.pid, "S")


def test_the_text_of_all_stacks_names_ranks_and_threads(ranks: Ranks):
    target = ranks.start(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n" + SLEEPS
    )
    ranks.wait_ready()
    text = stacks_text(take([target]))
    assert text.startswith("rank 0 (faulthandler)\n")
    assert text.index("thread MainThread:") < text.index("threading.py")


def test_the_main_thread_is_known_by_its_ident_or_as_the_oldest():
    text = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "a.py", line 3 in worker\n'
        "\n"
        "Current thread 0x00007f02 [python] (most recent call first):\n"
        '  File "b.py", line ??? in main\n'
        "  ...\n"
    )
    worker, main = parse_faulthandler(text)
    assert (worker.main, main.main, main.frames[0].line) == (False, True, 0)
    assert [thread.main for thread in parse_faulthandler(text, main=0x7F01)] == [True, False]
    assert group_stacks({}) == []


def test_saved_stacks_begin_with_the_script():
    boot = str(Path(SOURCE) / "argosy" / "process" / "rank" / "boot.py")
    calls = (Frame("/p/train.py", 7, "step"), Frame(boot, 74, "run_rank"), Frame("<string>", 1, "<module>"))
    text = stacks_text({0: Stack("faulthandler", (Thread("MainThread", calls, True),))})
    assert text.splitlines()[1:] == ["  thread MainThread:", "    /p/train.py:7 in step"]
