"""A process that cannot end itself is ended, with its code."""

import subprocess
import sys

PROGRAM = """
import ctypes, threading
from argosy.supervise.rank.hard_exit import exit_after
exit_after({after_s}, 42)
{wait}
"""


def code_of(wait: str, after_s: float = 0.2) -> int:
    program = PROGRAM.format(wait=wait, after_s=after_s)
    return subprocess.run([sys.executable, "-c", program], timeout=300).returncode


def test_a_thread_that_sleeps_with_the_gil_held_does_not_keep_the_process():
    assert code_of("ctypes.PyDLL(None).sleep(250)") == 42


def test_a_deadlock_does_not_keep_the_process():
    assert code_of("lock = threading.Lock(); lock.acquire(); lock.acquire()") == 42


def test_a_process_that_ends_in_time_has_its_own_code():
    assert code_of("raise SystemExit(3)", after_s=200) == 3
