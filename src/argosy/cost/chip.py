"""Chips and links, each a small file: peaks, memory, efficiency, curves that were measured, levels of links.

Every figure is published, measured or guessed; `sources` says which, and predictions carry it on.
"""

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from argosy.core import ConfigError

HERE = Path(__file__).parent / "chips"
Curve = tuple[tuple[float, float], ...]
"""Points of work and measured seconds, by growing work."""


@dataclass(frozen=True, slots=True)
class LinkLevel:
    """One level of the network: up to `ranks` ranks reach each other through it; 0 means any number."""

    ranks: int
    bandwidth: float
    """Bytes per second of one rank in each direction."""
    latency_s: float

    def __post_init__(self) -> None:
        if self.bandwidth <= 0:
            raise ConfigError(f"the bandwidth of a link must be positive: {self.bandwidth:g}")
        if self.latency_s < 0:
            raise ConfigError(f"the latency of a link must not be negative: {self.latency_s:g}")


@dataclass(frozen=True, slots=True)
class Chip:
    """One device and the links that join it to others."""

    name: str
    flops: dict[str, float]
    """Peak operations per second, by dtype."""
    memory_bytes: float
    memory_bandwidth: float
    matmul: float
    """The share of the peak that large matrix products reach."""
    attention: float
    memory: float
    """The share of the bandwidth that large element-wise operations reach."""
    launch_s: float
    """What each operation takes at least."""
    links: tuple[LinkLevel, ...]
    overlap: bool = True
    """Whether collectives run while the chip computes."""
    curves: dict[str, Curve] = field(default_factory=dict[str, Curve])
    """Measured seconds by work: `matmul` over flops, `memory` over bytes, `all_reduce` over bytes times ranks."""
    sources: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        peaks = [*self.flops.values(), self.memory_bytes, self.memory_bandwidth]
        if not self.flops or min(peaks) <= 0:
            raise ConfigError(f"{self.name}: peaks and memory must be positive")
        if not all(0 < share <= 1 for share in (self.matmul, self.attention, self.memory)):
            raise ConfigError(f"{self.name}: efficiencies must be above 0 and at most 1")
        if not self.links or self.links[-1].ranks != 0:
            raise ConfigError(f"{self.name}: the last link must have ranks = 0, for any number of ranks")

    def peak(self, dtype: str) -> float:
        """Operations per second in a dtype; a dtype that is not listed runs as fp32."""
        return self.flops.get(dtype, self.flops.get("fp32", max(self.flops.values())))

    def source(self, name: str) -> str:
        return self.sources.get(name, "guessed")

    def scaled(self, *, link: float = 1.0, flops: float = 1.0, memory: float = 1.0) -> "Chip":
        """The same chip with faster or slower parts."""
        if min(link, flops, memory) <= 0:
            raise ConfigError("a factor must be positive")
        if (flops, memory) != (1.0, 1.0):
            curves = {name: curve for name, curve in self.curves.items() if name == "all_reduce"}
        else:
            curves = self.curves
        return replace(
            self,
            flops={name: value * flops for name, value in self.flops.items()},
            memory_bandwidth=self.memory_bandwidth * memory,
            links=tuple(replace(each, bandwidth=each.bandwidth * link) for each in self.links),
            curves={name: curve for name, curve in curves.items() if link == 1.0 or name != "all_reduce"},
        )


def shipped() -> list[str]:
    """The names of the chips that come with Argosy."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def load_chip(name: str) -> Chip:
    """Read a shipped chip by name, or any chip by the path of its file.

    Raises:
        ConfigError: there is no such chip, or the file does not describe one.
    """
    path = Path(name) if name.endswith(".toml") else HERE / f"{name.lower()}.toml"
    if not path.is_file():
        raise ConfigError(f"no such chip: {name}", hint=f"{', '.join(shipped())}, or the path of a .toml file")
    try:
        return parse_chip(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a chip: {path}: {type(error).__name__} {error}") from error


def parse_chip(data: dict[str, Any]) -> Chip:
    efficiency = data["efficiency"]
    return Chip(
        name=data["name"],
        flops={name: float(value) for name, value in data["flops"].items()},
        memory_bytes=float(data["memory"]["bytes"]),
        memory_bandwidth=float(data["memory"]["bandwidth"]),
        matmul=float(efficiency["matmul"]),
        attention=float(efficiency["attention"]),
        memory=float(efficiency["memory"]),
        launch_s=float(data["launch_s"]),
        links=tuple(LinkLevel(int(e["ranks"]), float(e["bandwidth"]), float(e["latency_s"])) for e in data["links"]),
        overlap=bool(data.get("overlap", True)),
        curves={name: tuple((float(x), float(y)) for x, y in c) for name, c in data.get("curves", {}).items()},
        sources=dict(data.get("sources", {})),
    )


def parse_chips(text: str) -> tuple[int, Chip]:
    """Read `1024xh100` or `8xmy.toml`: how many of which chip."""
    count, times, name = text.partition("x")
    if not times or not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"not COUNTxCHIP: {text}", hint=f"as in 1024xh100; chips: {', '.join(shipped())}")
    return int(count), load_chip(name)
