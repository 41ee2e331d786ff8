"""Credentials by way of the run's directory, for nodes on which somebody else starts `argosy run --node-rank K`.

The directory is the channel that is trusted here: only this user can read what is written there.
On the head, `python -m argosy.hosts.handover DIRECTORY NODE` stands for a node: it answers the node's request with what
came on its standard input, and lives until the node has ended. A request is answered once it is the newest; after a
node has taken its answer there is no other one, since a second agent would not know of the first one's ranks.
"""

import os
import secrets
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from argosy.core import ConfigError, DeadlinePassed
from argosy.supervise import write_atomically

TURN_S = 0.2
JOIN_S = 900.0
"""How long a node waits for the head to start."""
GIVE_UP_S = 600.0
"""How long the head waits for a node."""


def requests_of(directory: Path) -> Path:
    """Where nodes and head of a run find each other."""
    return directory / "join"


class JoinRequest:
    """A node's side."""

    def __init__(self, directory: Path, node: str) -> None:
        self._folder, self._node, self._word = requests_of(directory), node, secrets.token_hex(8)

    def wait(self, timeout_s: float = JOIN_S) -> bytes:
        """Ask for credentials, and wait for them.

        Raises:
            DeadlinePassed: the head does not start.
        """
        with suppress(FileExistsError):
            self._folder.mkdir(parents=True, mode=0o700)
        if self._folder.stat().st_uid != os.getuid():
            raise ConfigError(f"the directory belongs to another user: {self._folder}")
        write_atomically(self._folder / f"{self._node}.request", self._word.encode())
        answer, deadline = self._folder / f"{self._node}.{self._word}", time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                os.listdir(self._folder)  # NFS looks at the server's directory again.
                content = answer.read_bytes()
                answer.unlink()
                return content
            time.sleep(TURN_S)
        raise DeadlinePassed("the start of `argosy run --node-rank 0`", timeout_s)

    def end(self) -> None:
        """Say that this node has ended."""
        with suppress(OSError):
            write_atomically(self._folder / f"{self._node}.{self._word}.ended", b"")


def answer_node(directory: Path, node: str, ticket: bytes) -> int:
    """The head's side: returns when the node has ended; its code is 1 if the node never came."""
    folder, answered = requests_of(directory), ""
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        taken = bool(answered) and not (folder / f"{node}.{answered}").exists()
        if taken and (folder / f"{node}.{answered}.ended").exists():
            return 0
        if not taken:
            if time.monotonic() > deadline:
                print(f"node {node} did not come within {GIVE_UP_S:.0f} s", file=sys.stderr)
                return 1
            answered = _answer_newest(folder, node, answered, ticket)
        time.sleep(TURN_S)


def _answer_newest(folder: Path, node: str, answered: str, ticket: bytes) -> str:
    word = ""
    with suppress(OSError):
        os.listdir(folder)
        word = (folder / f"{node}.request").read_text()
    if not word.isalnum() or word == answered:
        return answered
    with suppress(OSError):
        (folder / f"{node}.{answered}").unlink()
    path = folder / f"{node}.{word}"
    partial = folder / f".{node}.{word}"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(ticket)
    partial.rename(path)  # Whole, or not there.
    with suppress(OSError):
        (folder / f"{node}.request").unlink()
    return word


def clear_requests(directory: Path, node: str, word: str = "*") -> None:
    """Remove what is left of a node's requests; answers hold a key."""
    for path in requests_of(directory).glob(f"{node}.{word}"):
        path.unlink(missing_ok=True)


def main() -> int:
    """Stand for a node."""
    directory, node = Path(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ticket = sys.stdin.buffer.readline()
    try:
        return answer_node(directory, node, ticket)
    except KeyboardInterrupt:  # The run needs the node no more.
        return 0
    finally:
        clear_requests(directory, node)


if __name__ == "__main__":
    sys.exit(main())
