"""What processes leave behind: tracebacks in logs, error files, the end of a log."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.supervise.evidence.log_excerpt import error_file_text, exception_line, last_lines, last_traceback, log_tail
from argosy.supervise.evidence.proc_sample import read_proc

CASES = {
    "plain": ("def f():\n    raise ValueError('bad batch')\nf()", "ValueError: bad batch"),
    "chained": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('outer') from e",
        "RuntimeError: outer",
    ),
    "in passing": (
        "try:\n    {}['k']\nexcept KeyError:\n    raise OSError(5, 'disk')",
        "OSError: [Errno 5] disk",
    ),
    "group": (
        "raise ExceptionGroup('several', [ValueError('a'), TypeError('b')])",
        "ExceptionGroup: several (2 sub-exceptions)",
    ),
    "note": ("e = ValueError('bad')\ne.add_note('hint: look')\nraise e", "ValueError: bad"),
    "many lines": ("raise ValueError('first\\n  second\\nthird')", "ValueError: first"),
    "no message": ("assert False", "AssertionError"),
    "syntax": ("x = (1,\ny = 2", "SyntaxError: '(' was never closed"),
    "imported syntax": ("compile('x = = 1', 'm.py', 'exec')", "SyntaxError: invalid syntax"),
    "destructor": (
        "class A:\n    def __del__(self):\n        raise OSError('late')\na = A()\nraise ValueError('real')",
        "ValueError: real",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_last_traceback_is_what_python_printed(case: str, tmp_path: Path):
    body, named = CASES[case]
    script = tmp_path / "s.py"
    script.write_text(body)
    printed = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False).stderr
    found = last_traceback("epoch 1 loss 2.0\nTraceback of nothing\n" + printed)
    assert exception_line(found) == named
    expected = printed.strip("\n")
    if case == "destructor":
        expected = expected.partition("\nException ignored")[0]
    assert found.strip("\n") == expected


def test_an_earlier_traceback_that_was_survived_is_not_taken(tmp_path: Path):
    one = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\nKeyError: 1\n'
    two = one.replace("KeyError: 1", "ValueError: 2")
    assert last_traceback(f"{one}retrying\n\n{two}") == two.strip()


def test_the_prefix_of_torch_is_taken_off():
    plain = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\nKeyError: 1'
    prefixed = "\n".join(f"[rank3]: {line}" for line in plain.split("\n"))
    assert last_traceback(f"warming up\n{prefixed}\n") == plain


def test_a_log_without_a_traceback_has_none():
    assert last_traceback("all is well\nError: not really a traceback\n") == ""
    assert exception_line("") == ""


def test_the_tail_of_a_log_starts_with_a_line_and_skips_holes(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(10_000)))
    assert log_tail(log, bytes_max=100).splitlines()[-1] == "line 9999"
    assert log_tail(log, bytes_max=100).startswith("line ")
    log.write_bytes(b"head\n" + bytes(5000) + b"tail \xff\n")
    assert log_tail(log) == "head\ntail \ufffd\n"
    assert log_tail(tmp_path / "none") == ""


def test_a_progress_bar_counts_as_its_last_state():
    assert last_lines("a\n\n 1%\r 2%\r 3%\nb\r\n", 3) == ["a", " 3%", "b"]


def test_error_files_of_torch_are_read(tmp_path: Path):
    file = tmp_path / "error.json"
    details = {"py_callstack": "Traceback (most recent call last):\nValueError: x\n", "timestamp": "1"}
    file.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": details}}))
    assert exception_line(error_file_text(file)) == "ValueError: x"
    file.write_text(json.dumps({"message": "ValueError: plain"}))
    assert error_file_text(file) == "ValueError: plain"
    file.write_text("garbage")
    assert error_file_text(file) == ""


def test_a_process_with_an_odd_name_is_read():
    mine = read_proc(os.getpid(), deep=True)
    assert mine is not None
    assert mine.threads >= 1
    assert mine.each[0].tid == os.getpid()
    assert read_proc(2**22 + 5) is None
