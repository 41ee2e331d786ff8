"""Start Python programs by forking a process that has torch already: to import it takes two seconds of a core.

    subprocess.run([*warm(), "-c", "import torch; ..."])

The words stand for `sys.executable`: what follows is `-c TEXT`, `-m MODULE` or a file, with its arguments. The program
gets the environment, directory and streams of whoever starts it; signals reach it, and its exit code is passed on. It
runs in a session of its own, which is killed when whoever started it is gone. It imports Argosy itself, and exits
after its `atexit` functions, without the interpreter's own finalization.
"""

import atexit
import gc
import importlib
import marshal
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

PRELOAD = ["numpy", "msgspec", "psutil", "torch", "torch.distributed", "torch._dynamo"]

STARTER = """
import marshal, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
request = marshal.dumps((sys.argv[2:], os.getcwd(), dict(os.environ)))
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
for number in (1, 2, 10, 12, 15):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
code = int.from_bytes(server.recv(4), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""Stands for the program where it was started. It imports little: it is a fortieth of a second of a core."""


@cache
def warm() -> list[str]:
    """The words that a command begins with, instead of `sys.executable`; the first call starts what is forked."""
    directory = tempfile.mkdtemp(prefix="warm-", dir=os.environ.get("ARGOSY_SANDBOX", "/tmp"))
    path = f"{directory}/s"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, path]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    atexit.register(_end, server, directory)
    assert server.stdout
    assert server.stdout.readline() == b"listening\n"
    return [sys.executable, "-SEc", STARTER, path]


@cache
def warm_python() -> str:
    """The same as a program."""
    program = Path(warm()[-1]).with_name("python")
    program.write_text(f'#!/bin/sh\nexec {shlex.join(warm())} "$@"\n')
    program.chmod(0o755)
    return str(program)


def _end(server: "subprocess.Popen[bytes]", directory: str) -> None:
    server.communicate(b"", 60)
    shutil.rmtree(directory)


class Server:
    """Forks programs and tells their starters how they ended."""

    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.starters: dict[int, socket.socket] = {}
        self.wakeup, self.wake = socket.socketpair()
        self.wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        self.selector = selectors.DefaultSelector()
        for file in (self.listener, self.wakeup, 0):
            self.selector.register(file, selectors.EVENT_READ)

    def serve(self) -> list[str]:
        """Serve until stdin ends; returns, with the words of a program, in each process that is forked for one."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    self.kill_all()
                    sys.exit()
                elif key.fileobj is self.wakeup:
                    self.wakeup.recv(4096)
                    self.reap()
                elif key.fileobj is self.listener:
                    if (words := self.start(self.listener.accept()[0])) is not None:
                        return words
                elif key.data in self.starters:
                    self.hear(key.data)

    def start(self, starter: socket.socket) -> list[str] | None:
        head, streams, _, _ = socket.recv_fds(starter, 4, 3)
        request = b""
        while len(request) < int.from_bytes(head, "big"):
            request += starter.recv(1 << 20)
        words, cwd, environment = marshal.loads(request)
        if pid := os.fork():
            self.starters[pid] = starter
            self.selector.register(starter, selectors.EVENT_READ, pid)
            for stream in streams:
                os.close(stream)
            return None
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for ours in (self.listener, self.wakeup, self.wake, self.selector, starter, *self.starters.values()):
            ours.close()
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        return words

    def hear(self, pid: int) -> None:
        """A signal for the program, or its starter is gone."""
        numbers = self.starters[pid].recv(64)
        with suppress(ProcessLookupError):
            for number in numbers:
                os.kill(pid, number)
            if not numbers:
                self.selector.unregister(self.starters[pid])
                os.killpg(pid, signal.SIGKILL)

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                starter = self.starters.pop(ended[0])
                with suppress(KeyError):
                    self.selector.unregister(starter)
                with suppress(OSError):
                    starter.send(os.waitstatus_to_exitcode(ended[1]).to_bytes(4, "big", signed=True))
                starter.close()

    def kill_all(self) -> None:
        for pid in self.starters:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def run(words: list[str]) -> None:
    """Run a program as the interpreter would that was just started for it."""
    environment = os.environ
    if words[0] == "-u":
        words = words[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    for option in filter(None, environment.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(option)  # type: ignore[arg-type]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    environment.pop("PYTHON_EXEC", None)  # It told torchrun how to start us.
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv, text, name = ["-c", *words[2:]], words[1], "<string>"
        sys.path.insert(0, "")
    else:
        sys.argv, text, name = words, Path(words[0]).read_text(), os.path.abspath(words[0])
        main.__file__ = name
        sys.path.insert(0, os.path.dirname(name))
    exec(compile(text, name, "exec"), main.__dict__)


def leave(words: list[str]) -> None:
    """Run a program and exit as it did. Its modules are not torn down: with torch that is another second of a core."""
    code: Any = 0
    try:
        run(words)
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1 if not isinstance(error, KeyboardInterrupt) else 130
    with suppress(AttributeError):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    for each in PRELOAD:
        importlib.import_module(each)
    gc.freeze()  # A collection in a fork would copy the pages of all modules.
    here = Server(sys.argv[1])
    print("listening", flush=True)
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    leave(here.serve())
