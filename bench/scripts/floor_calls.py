"""Floors: a raw blocking Unix socket with msgspec, multiprocessing's pipes, torch.distributed.rpc.

floor_calls.py {socket|pipe|rpc} {one|gather|pipeline} N
"""

import multiprocessing
import os
import socket
import struct
import sys
from typing import Any

import msgspec
from timing import each, once, say

encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
HEADER = struct.Struct("<I")


def send(sock: socket.socket, value: object) -> None:
    raw = encode(value)
    sock.sendall(HEADER.pack(len(raw)) + raw)


def receive(sock: socket.socket, buffer: bytearray) -> object | None:
    while len(buffer) < 4 or len(buffer) < 4 + HEADER.unpack_from(buffer)[0]:
        data = sock.recv(1 << 16)
        if not data:
            return None
        buffer += data
    end = 4 + HEADER.unpack_from(buffer)[0]
    value = decode(bytes(buffer[4:end]))
    del buffer[:end]
    return value


class Socket:
    """A forked child behind a socket pair."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.buffer = bytearray()
        if os.fork() == 0:
            self.sock.close()
            buffer = bytearray()
            while (value := receive(theirs, buffer)) is not None:
                send(theirs, value)
            os._exit(0)
        theirs.close()

    def put(self, value: object) -> None:
        send(self.sock, value)

    def get(self) -> object:
        return receive(self.sock, self.buffer)


class Pipe:
    """A forked child behind multiprocessing's pipe."""

    def __init__(self) -> None:
        self.mine, theirs = multiprocessing.Pipe()
        if os.fork() == 0:
            while True:
                try:
                    theirs.send(theirs.recv())
                except (EOFError, OSError):
                    os._exit(0)

    def put(self, value: object) -> None:
        self.mine.send(value)

    def get(self) -> object:
        return self.mine.recv()


def pipelined(child: Socket | Pipe, count: int) -> None:
    for start in range(0, count, 200):
        for number in range(start, start + 200):
            child.put(["ping", number])
        for _ in range(200):
            child.get()


def rpc(what: str, count: int) -> None:
    import torch.distributed.rpc as rpc

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = sys.argv[4]
    name = os.fork() and "client"
    rpc.init_rpc(name or "server", rank=0 if name else 1, world_size=2)
    if name:
        if what == "one":
            say(each(lambda: rpc.rpc_sync("server", abs, (1,)), count))
        else:
            say(once(lambda: [f.wait() for f in [rpc.rpc_async("server", abs, (1,)) for _ in range(count)]], count))
    rpc.shutdown()


def main() -> None:
    kind, what, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "rpc":
        rpc(what, count)
        return
    make: Any = Socket if kind == "socket" else Pipe
    children = [make() for _ in range(count if what == "gather" else 1)]

    def gather() -> None:
        for child in children:
            child.put(["ping", 1])
        for child in children:
            child.get()

    match what:
        case "one":
            say(each(gather, count))
        case "gather":
            say(each(gather, 20))
        case "pipeline":
            say(once(lambda: pipelined(children[0], count), count))


if __name__ == "__main__":
    main()
