"""The port under which the ranks of one generation find their store."""

import socket

from argosy.control import Launch


class StorePort:
    """A listening socket that waits for the first rank; without an agent's store only a free port's number."""

    def __init__(self, launch: Launch, generation: int) -> None:
        self.generation = generation
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((launch.master_addr, launch.master_port))
        except OSError:
            listener.close()
            raise
        self.port: int = listener.getsockname()[1]
        self.listener: socket.socket | None = listener
        if launch.store:
            listener.listen(4096)
        else:  # Rank 0 will listen there itself.
            self.close()

    @classmethod
    def known(cls, port: int, listener: int | None, generation: int) -> "StorePort":
        """The port of an earlier agent, with its listener if no store serves it yet."""
        self = cls.__new__(cls)
        self.generation, self.port = generation, port
        self.listener = None if listener is None else socket.socket(fileno=listener)
        return self

    def close(self) -> None:
        """Close our copy; a store that was started keeps its own."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
