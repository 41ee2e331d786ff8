"""Nodes of a Ray cluster: one actor per node, in a strictly spread placement group, runs the agent there.

Ray places the actors and watches them. What an actor gets comes over Ray's own channel. If an actor's process dies, or
its raylet, so does the agent that it runs, since that reads from its pipe.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.core import ConfigError
from argosy.hosts.engines import HostProcess, route_to

PLACE_S = 300.0
"""How long the cluster has to find room."""
END_S = 20.0
LINES = 5


class RayEngine:
    """`--on ray`: as many nodes as are asked for, of the cluster that RAY_ADDRESS or this machine names."""

    def __init__(self, text: str) -> None:
        count, _, address = text.partition("@")
        if not count.isdecimal():
            raise ConfigError(f"--on ray needs --hosts: how many nodes to use: {text!r}", hint="--on ray --hosts 2")
        self.names = [f"host{number}" for number in range(int(count))]
        self._address = address or "auto"
        self._ray: Any = None
        self._group: Any = None

    def open(self) -> str:
        """Connect, and have the nodes set aside."""
        ray = self._ray = _import_ray()
        try:
            ray.init(address=self._address, log_to_driver=False, configure_logging=False, namespace="argosy")
            bundles = [{"CPU": 1} for _ in self.names]
            self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
            if not self._group.wait(PLACE_S):
                raise ConfigError(f"Ray has not found {len(bundles)} nodes with a free CPU within {PLACE_S:.0f} s")
            here = ray.get_runtime_context().get_node_id()
        except (ConnectionError, ray.exceptions.RayError) as error:
            raise ConfigError(f"the Ray cluster cannot be used: {error}") from None
        others = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        return route_to(others[0]) if others else "127.0.0.1"

    def start(self, name: str, words: Sequence[str], ticket: bytes) -> HostProcess:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        scheduling = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self.names.index(name)
        )
        actor = self._ray.remote(num_cpus=1, max_restarts=0, max_concurrency=2)(HostActor)
        handle = actor.options(scheduling_strategy=scheduling).remote()
        return ActorProcess(self._ray, handle, handle.serve.remote([*words, "--tied"], ticket, os.getcwd()))

    def options(self, runtime: Path, name: str) -> list[str]:
        return []

    def reason(self, name: str, code: int) -> str:
        return "Ray says that its actor died" if code == DIED else f"its agent ended ({code})"

    def close(self) -> None:
        if self._ray is not None and self._ray.is_initialized():
            if self._group is not None:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.util.remove_placement_group(self._group)
            self._ray.shutdown()


DIED = 255


class ActorProcess:
    """An actor that runs an agent, with the methods of a child process."""

    def __init__(self, ray: Any, handle: Any, answer: Any) -> None:
        self._ray, self._handle, self._answer = ray, handle, answer
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._ray.wait([self._answer], timeout=0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not self._ray.wait([self._answer], timeout=timeout)[0]:
                raise subprocess.TimeoutExpired("a Ray actor", timeout)
            self._read()
        assert self.returncode is not None
        return self.returncode

    def _read(self) -> None:
        try:
            code, said = self._ray.get(self._answer)
        except self._ray.exceptions.RayError as error:
            code, said = DIED, str(error).splitlines()[0] if str(error) else type(error).__name__
        if said:
            print(said, file=sys.stderr, flush=True)
        self.returncode = int(code)

    def terminate(self) -> None:
        if self.poll() is None:
            self._handle.end.remote()

    def kill(self) -> None:
        self._ray.kill(self._handle)


class HostActor:
    """On a node: runs the agent. It has one thread that waits and one that can end it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def serve(self, words: list[str], ticket: bytes, cwd: str) -> tuple[int, str]:
        """Until the agent ends; its code, and its last lines."""
        with suppress(OSError):
            os.chdir(cwd)
        process = self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.write(ticket + b"\n")
            process.stdin.flush()  # It stays open: its end is that of this process.
        said = process.stdout.read().decode(errors="replace").splitlines()[-LINES:]
        return process.wait(), "\n".join(said)

    def end(self) -> None:
        """Have the agent end everything on this node."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("--on ray needs Ray", hint="pip install ray cryptography") from None
    return ray
