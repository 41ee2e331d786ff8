"""Listings: tables that fit a terminal, and plain lines in a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

import pytest
from console import Console

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
FAILS = "import sys\nprint('x' * 200, file=sys.stderr)\nraise ValueError('no such shard: ' + 'part/' * 40)\n"


def in_terminal(console: Console, columns: int, *words: str) -> str:
    """What a command writes to a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {name: value for name, value in console.env.items() if name not in ("COLUMNS", "NO_COLOR")}
    command = [console.python, "-m", "argosy", *words]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=console.cwd, env={**env, "TERM": "xterm"}
    ):
        os.close(theirs)
        text = b""
        while True:
            try:
                text += os.read(ours, 65536)
            except OSError:  # Everybody has closed it.
                break
    os.close(ours)
    return text.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_in_a_terminal_lines_fit_and_nothing_is_lost(console: Console, columns: int) -> None:
    (console.cwd / "fails.py").write_text(FAILS)
    assert console.argosy("run", "--name", "one", "fails.py").code == 1
    for words, said in (
        (["ps", "--all"], "failed (1)"),
        (["ps", "one"], "exit code 1"),
        (["why", "one"], "no such shard: " + "part/" * 40),
        (["doctor"], "runtime dir"),
        (["clean"], "one"),
    ):
        shown = in_terminal(console, columns, *words)
        assert ESCAPE.search(shown), "colours"
        lines = ESCAPE.sub("", shown).splitlines()
        commands = ("resume", "rerun", "logs", "stacks")
        assert [line for line in lines if len(line) > columns and not line.startswith(commands)] == []
        assert said.replace(" ", "") in "".join("".join(lines).split())


def test_in_a_pipe_there_are_plain_lines(console: Console) -> None:
    (console.cwd / "fails.py").write_text(FAILS)
    assert console.argosy("run", "--name", "one", "fails.py").code == 1
    for words in (["ps", "--all"], ["why", "one"], ["doctor"], ["clean"]):
        assert "\x1b" not in console.argosy(*words).text
    (line,) = [line for line in console.argosy("doctor").text.splitlines() if "runtime dir" in line]
    assert line.endswith(str(console.runtime))


def test_rich_is_imported_only_for_a_terminal(console: Console) -> None:
    for words in ("ps --all", "doctor", "--help", "run --help"):
        program = f"import sys; sys.argv = ['argosy', *{words.split()!r}]\nfrom argosy.cli import main\n"
        program += "try:\n    main()\nfinally:\n    sys.exit(int('rich' in sys.modules))\n"
        assert console.run([console.python, "-c", program]).code == 0
