"""Bytes between a client of the head and a process on another host: `exec` and `debug` over hosts.

On the host one thread per direction reads or writes and may block; the agent's loop only passes messages on. After each
piece of a stream its sender waits until the receiver has taken it, so nothing piles up anywhere.
"""

import os
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from argosy.control import rank_defaults
from argosy.core import ArgosyError
from argosy.fabric import Link
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.host_messages import HostTunnel, TunnelContent
from argosy.supervise.agent.hosted_run import HostedRun
from argosy.supervise.environment import open_environment
from argosy.supervise.messages import OpenTunnel, Refused, ToAgent, TunnelClosed, TunnelData, TunnelTook

PIECE = 1 << 15
STDIN, STDOUT, STDERR = 0, 1, 2


class TunnelEnd:
    """One process, or one socket of a rank at a breakpoint, and the threads that serve it."""

    def __init__(self, tell: Callable[[TunnelContent], None], end: "subprocess.Popen[bytes] | socket.socket") -> None:
        self._tell, self._end = tell, end
        self._input: SimpleQueue[bytes] = SimpleQueue()
        self._took = {STDOUT: threading.Semaphore(0), STDERR: threading.Semaphore(0)}
        self._closed = False
        threads = [threading.Thread(target=self._write, daemon=True)]
        self._readers = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in self._outputs()]
        for thread in [*threads, *self._readers, threading.Thread(target=self._wait, daemon=True)]:
            thread.start()

    def hear(self, message: TunnelContent) -> None:
        """The client sends a piece, or has taken one."""
        match message:
            case TunnelData(data=data):
                self._input.put(data)
            case TunnelTook(stream) if stream in self._took:
                self._took[stream].release()
            case TunnelClosed():
                self.close()
            case _:
                pass

    def close(self) -> None:
        """Nobody listens any more: end the process with what it started."""
        self._closed = True
        self._input.put(b"")
        for took in self._took.values():
            took.release()
        with suppress(OSError):
            if isinstance(self._end, socket.socket):
                self._end.shutdown(socket.SHUT_RDWR)
            else:
                os.killpg(self._end.pid, signal.SIGKILL)

    def _outputs(self) -> tuple[int, ...]:
        return (STDOUT,) if isinstance(self._end, socket.socket) else (STDOUT, STDERR)

    def _fd(self, stream: int) -> int:
        if isinstance(self._end, socket.socket):
            return self._end.fileno()
        files = {STDIN: self._end.stdin, STDOUT: self._end.stdout, STDERR: self._end.stderr}
        file = files[stream]
        assert file is not None
        return file.fileno()

    def _read(self, stream: int) -> None:
        with suppress(OSError):
            while data := os.read(self._fd(stream), PIECE):
                self._tell(TunnelData(stream, data))
                self._took[stream].acquire()
                if self._closed:
                    return

    def _write(self) -> None:
        with suppress(OSError):
            while data := self._input.get():
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd(STDIN), view) :]
                self._tell(TunnelTook(STDIN))
        with suppress(OSError):
            if isinstance(self._end, socket.socket):
                self._end.shutdown(socket.SHUT_WR)
            elif self._end.stdin is not None:
                self._end.stdin.close()

    def _wait(self) -> None:
        for reader in self._readers:
            reader.join()
        code = 0
        if isinstance(self._end, socket.socket):
            self._end.close()
        else:
            code = self._end.wait()
        self._input.put(b"")
        self._tell(TunnelClosed(code if code >= 0 else 128 - code))


class Tunnels:
    """Those that end on this host. `wake` ends the wait of the agent's loop."""

    def __init__(self, decisions: Decisions, hosted: Mapping[str, HostedRun], wake: Callable[[], None]) -> None:
        self._decisions, self._hosted, self._wake = decisions, hosted, wake
        self._ends: dict[int, TunnelEnd] = {}
        self._out: deque[HostTunnel] = deque()

    def hear(self, message: HostTunnel) -> None:
        """The head passes something on."""
        number, content = message.number, message.content
        if isinstance(content, OpenTunnel):
            try:
                self._ends[number] = TunnelEnd(lambda said: self._tell(number, said), self._open(content))
                self._tell(number, TunnelTook(STDIN))  # There is somebody to take a first piece.
            except OSError as error:
                self._tell(number, TunnelClosed(127, f"{error.strerror}: {error.filename or content.argv[:1]}"))
            except LookupError as error:
                self._tell(number, TunnelClosed(2, str(error.args[0])))
        elif number in self._ends:
            self._ends[number].hear(content)

    def take(self) -> list[HostTunnel]:
        """What is to be sent."""
        found: list[HostTunnel] = []
        while self._out:
            message = self._out.popleft()
            found.append(message)
            if isinstance(message.content, TunnelClosed):
                self._ends.pop(message.number, None)
        return found

    def close(self) -> None:
        """The head is gone, and with it the clients."""
        for end in self._ends.values():
            end.close()
        self._ends.clear()
        self._out.clear()

    def _tell(self, number: int, content: TunnelContent) -> None:
        self._out.append(HostTunnel(number, content))
        self._wake()

    def _open(self, message: OpenTunnel) -> "subprocess.Popen[bytes] | socket.socket":
        run, local_run = self._hosted.get(message.run), self._decisions.state.host.runs.get(message.run)
        local = None if local_run is None else local_run.ranks.get(message.rank)
        if run is None or local_run is None or local is None or local.process is None:
            raise LookupError(f"rank {message.rank} is not alive")
        if not message.argv:
            return _reach_breakpoint(run.files, message.rank)
        sealed = open_environment(run.environment.sealed)
        spec = run.spec(local.rank, (local.address, local.port), local_run.view, store=run.launch.store)
        own = {**rank_defaults(run.launch), **spec.defaults}
        return subprocess.Popen(
            message.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=run.launch.cwd,
            env={**own, **sealed.variables, **sealed.secrets, **spec.variables},
            start_new_session=True,
        )


def _reach_breakpoint(folder: Path, rank: int) -> socket.socket:
    waiting = sorted(folder.glob(f"{rank}.*.debug"), key=lambda path: int(path.name.split(".")[1]))
    if waiting:
        client = socket.socket(socket.AF_UNIX)
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # However long the path is.
            client.connect(f"/proc/self/fd/{directory}/{waiting[-1].name}")
            return client
        except OSError:  # It went on, or is just being reached by somebody else.
            client.close()
        finally:
            os.close(directory)
    raise LookupError(f"rank {rank} is not at a breakpoint")


class TunnelHost(Protocol):
    """A host that something can be sent to."""

    def send(self, message: object) -> None: ...


class TunnelRelay:
    """On the head: passes on between clients and hosts."""

    def __init__(self) -> None:
        self._tunnels: dict[int, tuple[Link[ToAgent], TunnelHost]] = {}
        self._numbers = 0

    def open(self, link: Link[ToAgent], host: TunnelHost, message: OpenTunnel) -> None:
        """A client wants to reach a rank of this host."""
        self._numbers += 1
        self._tunnels[self._numbers] = link, host
        host.send(HostTunnel(self._numbers, message))

    def hear_client(self, link: Link[ToAgent], content: TunnelData | TunnelTook) -> None:
        """A client of some tunnel speaks."""
        for number, (client, host) in self._tunnels.items():
            if client is link:
                host.send(HostTunnel(number, content))

    def hear_host(self, message: HostTunnel) -> None:
        """A host speaks."""
        known = self._tunnels.get(message.number)
        if known is None:
            return
        if isinstance(message.content, TunnelClosed):
            del self._tunnels[message.number]
        with suppress(ArgosyError):  # Its end is seen when it is read.
            known[0].send(message.content)

    def client_left(self, link: Link[ToAgent]) -> None:
        """A client is gone."""
        for number, (client, host) in list(self._tunnels.items()):
            if client is link:
                del self._tunnels[number]
                host.send(HostTunnel(number, TunnelClosed(0)))

    def host_left(self, lost: TunnelHost) -> None:
        """The link of a host ended."""
        for number, (client, host) in list(self._tunnels.items()):
            if host is lost:
                del self._tunnels[number]
                with suppress(ArgosyError):
                    client.send(Refused("the connection to the host of the rank ended"))
