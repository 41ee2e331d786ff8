"""A barrier over loopback TCP from the standard library: rank 0 collects the others and lets them go.

The same for every launcher, so that a bare rank costs nothing but its process.
"""

import os
import socket
import time

DEADLINE_S = 300.0


def place() -> tuple[int, int]:
    """Rank and size, as torchrun, Argosy or mpirun tell them."""
    env = os.environ
    rank = env.get("RANK") or env.get("OMPI_COMM_WORLD_RANK") or "0"
    size = env.get("WORLD_SIZE") or env.get("OMPI_COMM_WORLD_SIZE") or "1"
    return int(rank), int(size)


def tcp_barrier(port: int) -> None:
    rank, size = place()
    if rank == 0:
        _collect(port, size - 1)
        return
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as link:
                if link.recv(1) == b"g":
                    return
        except OSError:
            pass
        if time.monotonic() > end:
            raise TimeoutError(f"no barrier on port {port}")
        time.sleep(0.005)


def _collect(port: int, others: int) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen(4096)
        server.settimeout(DEADLINE_S)
        links = [server.accept()[0] for _ in range(others)]
        for link in links:
            link.sendall(b"g")
            link.close()
