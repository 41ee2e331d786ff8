"""Where the peers live: each in its own environment under .cache/peers/, made only when asked for.

    python bench/peers.py                      what is there and what is missing
    python bench/peers.py --setup [NAME ...]   make what is missing

A peer that is missing is reported as missing by the benches; it never stops them. torchrun and the
forkserver are those of the interpreter that runs the bench, mpirun is the system's if it has one.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "peers"


class Missing(Exception):
    """A peer that this machine does not have; the text says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What to install for a peer. With `shares_torch` it sees the packages of the interpreter given."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    download: str
    shares_torch: bool = False

    @property
    def home(self) -> Path:
        return CACHE / self.name

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.home / "ready"


MONARCH_NEEDS = (
    "pyzmq pyarrow requests pyre-extensions cloudpickle lark tabulate opentelemetry-api clusterscope flask "
    "py-spy xxhash"
)
PEERS = {
    peer.name: peer
    for peer in (
        # Without --no-deps it would bring a second torch of several GB.
        Peer(
            name="monarch",
            steps=(("--no-deps", "torchmonarch==0.7.0"), tuple(MONARCH_NEEDS.split())),
            download="about 150 MB",
            shares_torch=True,
        ),
        Peer(
            name="lightning",
            steps=(
                ("--no-deps", "lightning==2.6.6", "torchmetrics", "lightning-utilities"),
                ("tqdm", "PyYAML", "packaging"),
            ),
            download="about 10 MB",
            shares_torch=True,
        ),
        Peer(
            name="loaders",
            steps=(("--no-deps", "torchdata==0.11.0"), ("grain==0.2.18", "pyarrow==26.0.1")),
            download="about 150 MB",
            shares_torch=True,
        ),
        # It wants an older numpy than torch has here; the clients of clouds, which it also wants, are left out.
        Peer(
            name="mosaic",
            steps=(
                ("--no-deps", "mosaicml-streaming==0.13.0", "torchvision"),
                ("numpy<2.2", "transformers<5", "xxhash<4", "zstd", "Brotli", "python-snappy", "pillow", "catalogue"),
            ),
            download="about 80 MB",
            shares_torch=True,
        ),
        Peer(name="mpi", steps=(("mpi4py==4.1.2", "numpy"),), download="about 20 MB"),
        Peer(
            name="torchft",
            steps=(
                ("--no-deps", "torchft-nightly==2026.10.26"),
                ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
            ),
            download="about 20 MB",
            shares_torch=True,
        ),
        Peer(name="ray", steps=(("ray[default]==2.60.0", "numpy"),), download="about 150 MB", shares_torch=True),
    )
}


def python_of(name: str) -> str:
    """Return the peer's interpreter.

    Raises:
        Missing: it was not set up.
    """
    peer = PEERS[name]
    if not peer.stamp.exists():
        raise Missing(f"not installed: python bench/peers.py --setup {name}")
    return str(peer.python)


def torchrun() -> list[str]:
    """The command of torchrun in the running environment."""
    return [sys.executable, "-m", "torch.distributed.run"]


def mpirun() -> str:
    found = shutil.which("mpirun")
    if found is None:
        raise Missing("no mpirun on PATH: apt install openmpi-bin")
    return found


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _torch_home(python: str) -> str:
    """Where an interpreter has torch: perhaps in an environment that it borrows."""
    words = "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])"
    return subprocess.run([python, "-c", words], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def _site_packages(python: str) -> str:
    if python == sys.executable:
        return sysconfig.get_path("purelib")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run([python, "-c", code], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def set_up(peer: Peer, torch_python: str) -> None:
    """Make the peer's environment; a broken attempt leaves no stamp and is made again."""
    print(f"{peer.name}: downloads {peer.download} into {peer.home}", flush=True)
    shutil.rmtree(peer.home, ignore_errors=True)
    subprocess.run([torch_python, "-m", "venv", str(peer.home)], check=True)
    if peer.shares_torch:
        inner = Path(_site_packages(str(peer.python)))
        (inner / "shared_torch.pth").write_text(_torch_home(torch_python) + "\n")
    for step in peer.steps:
        subprocess.run([str(peer.python), "-m", "pip", "install", "--quiet", *step], check=True, timeout=1800)
    frozen = subprocess.run(
        [str(peer.python), "-m", "pip", "list", "--format=freeze"],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    peer.stamp.write_text(frozen.stdout)
    print(f"{peer.name}: ready", flush=True)


def describe(name: str) -> str:
    try:
        return python_of(name)
    except Missing as missing:
        return str(missing)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Set up or list the peers of the benches.")
    parser.add_argument("--setup", nargs="*", metavar="NAME", help=f"any of: {' '.join(PEERS)} (default: all)")
    parser.add_argument("--torch-env", metavar="PYTHON", help="interpreter with torch that the peers share")
    args = parser.parse_args(argv)
    torch_python = args.torch_env or os.environ.get("PYTHON") or sys.executable
    failed = False
    if args.setup is not None:
        for name in args.setup or PEERS:
            if name not in PEERS:
                parser.error(f"no such peer: {name}")
            if PEERS[name].stamp.exists():
                continue
            try:
                set_up(PEERS[name], torch_python)
            except (subprocess.SubprocessError, OSError) as error:
                failed = True
                print(f"{name}: could not be set up: {error}", file=sys.stderr)
    print(f"torchrun  {version_of('torch')} in {sys.executable}")
    for name in PEERS:
        print(f"{name:<9} {describe(name)}")
    try:
        print(f"mpirun    {mpirun()}")
    except Missing as missing:
        print(f"mpirun    {missing}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
