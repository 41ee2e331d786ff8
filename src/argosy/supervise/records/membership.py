"""What makes the agent of a runtime directory a host of somebody else's run: credentials, and where the head is."""

import os
import socket
from contextlib import closing
from pathlib import Path

import msgspec

from argosy.core import ConfigError
from argosy.fabric import Credentials, TlsAddress, parse_address


class HostNeeds(msgspec.Struct, frozen=True):
    """What a host must have to be used for a run."""

    ranks: int = 1
    accelerators: int = 0
    directory: str = ""
    """The run's, which all hosts share."""
    command: str = ""
    """A shell command that has to succeed."""


class Membership(msgspec.Struct, frozen=True):
    """A host's part in a run. It holds a secret key."""

    credentials: Credentials
    head: str
    """`tls://HOST:PORT`"""
    needs: HostNeeds = HostNeeds()

    @property
    def address(self) -> TlsAddress:
        return parse_address(self.head)


def write_membership(runtime: Path, membership: Membership) -> None:
    """Keep it where only this user, and the next agent, can read it."""
    fd = os.open(runtime / "member.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(membership))


def read_membership(runtime: Path) -> Membership:
    """The membership of a runtime directory that has a `member.json`.

    Raises:
        ConfigError: it holds something else.
    """
    return decode_membership((runtime / "member.json").read_bytes())


def decode_membership(content: bytes) -> Membership:
    """Read what an engine passed to a host.

    Raises:
        ConfigError: it is something else.
    """
    try:
        membership = msgspec.json.decode(content, type=Membership)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"these are no credentials of a host: {error}") from None
    parse_address(membership.head)
    return membership


def own_address(head: TlsAddress) -> tuple[str, str]:
    """The address under which the hosts of the run see this one, and the name of its network interface."""
    import psutil  # It takes time.

    family = socket.AF_INET6 if ":" in head.host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect((head.host, head.port))  # Sends nothing: the kernel chooses the route.
        address: str = probe.getsockname()[0]
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return address, interface
    return address, "lo"
