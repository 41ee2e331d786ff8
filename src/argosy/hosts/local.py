"""Virtual hosts on this machine, each in a network namespace of its own where root allows, else on loopback."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from argosy.core import ConfigError
from argosy.hosts.engines import HostProcess, start_process
from argosy.supervise import clear_host

END_S = 10.0
_TOOLS = ("ip", "nsenter")


class LocalEngine:
    """A bridge on this machine, and per host a namespace whose `eth0` is plugged into it."""

    def __init__(self, count: int, run: str) -> None:
        self.names = [f"host{number}" for number in range(count)]
        digest = hashlib.blake2s(run.encode(), digest_size=4).digest()
        self.bridge = f"ar{digest.hex()}"
        self._net = f"10.{128 + digest[0] % 128}.{digest[1]}"
        self._isolated = False
        self._runtimes: dict[str, Path] = {}

    def open(self) -> str:
        self._isolated = len(self.names) < 250 and can_isolate()
        if not self._isolated:
            return "127.0.0.1"
        self.close()  # Of an earlier process that was killed.
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            raise ConfigError(f"virtual hosts cannot be made: {error.stderr.decode().strip()}") from None
        return f"{self._net}.1"

    def start(self, name: str, words: Sequence[str], ticket: bytes) -> HostProcess:
        return start_process(self._command(name, words), ticket)

    def _command(self, name: str, words: Sequence[str]) -> list[str]:
        if not self._isolated:
            return list(words)
        return ["nsenter", f"--net=/run/netns/{self.namespace(name)}", "--", *words]

    def options(self, runtime: Path, name: str) -> list[str]:
        place = runtime.with_name(f"{self.bridge}-{name}")  # Beside it: the hosts share a disk.
        self._runtimes[name] = place
        return ["--runtime", str(place)]

    def reason(self, name: str, code: int) -> str:
        return f"its agent ended ({code})"

    def namespace(self, name: str) -> str:
        """The network namespace of a host."""
        return f"{self.bridge}-{name}"

    def close(self) -> None:
        for name in self.names if self._isolated else ():
            namespace = self.namespace(name)
            if os.path.exists(f"/run/netns/{namespace}"):
                _end_all(namespace)
                _try("ip", "netns", "del", namespace)
        if self._isolated:
            _try("ip", "link", "del", self.bridge)
        for runtime in self._runtimes.values():  # Of hosts that lost their power: there is no other disk to leave.
            clear_host(runtime)

    def _make(self) -> None:
        _do("ip", "link", "add", self.bridge, "type", "bridge")
        _do("ip", "addr", "add", f"{self._net}.1/24", "dev", self.bridge)
        _do("ip", "link", "set", self.bridge, "up")
        for number, name in enumerate(self.names):
            namespace, port = self.namespace(name), f"{self.bridge}.{number}"
            _do("ip", "netns", "add", namespace)
            _do("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _do("ip", "link", "set", port, "master", self.bridge, "up")
            _do("ip", "-n", namespace, "addr", "add", f"{self._net}.{number + 2}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do("ip", "-n", namespace, "link", "set", device, "up")


def can_isolate() -> bool:
    """Whether this user may make network namespaces."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in _TOOLS):
        return False
    probe = f"ar-probe-{os.getpid()}"
    made = _try("ip", "netns", "add", probe)
    bridged = made and _try("ip", "link", "add", probe[:15], "type", "bridge")
    _try("ip", "link", "del", probe[:15])
    _try("ip", "netns", "del", probe)
    return bridged


def _end_all(namespace: str) -> None:
    """Kill what still runs in a namespace, and wait until it is gone."""
    deadline = time.monotonic() + END_S
    while (pids := namespace_pids(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def namespace_pids(namespace: str) -> list[int]:
    """The living processes in a namespace."""
    with contextlib.suppress(OSError):
        wanted = os.stat(f"/run/netns/{namespace}").st_ino
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _network(entry) == wanted]
    return []


def _network(process: Path) -> int:
    with contextlib.suppress(OSError):
        if b") Z " not in (process / "stat").read_bytes():
            return os.stat(process / "ns/net").st_ino
    return 0


def _do(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _try(*words: str) -> bool:
    return not subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).returncode
