"""What the kernel's log says of GPUs: NVIDIA's driver writes an `Xid` line when one of them reports an error.

    NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.

Parsing and blaming are pure; `KernelLog` reads the log and the driver's files. Never tried on a machine with a GPU: the
tests give lines as NVIDIA's documentation and published logs have them.

X1  An Xid is about a rank if it came while the rank lived and names the rank's process; or, of the GPU that the rank
    sees, names no process or says that the GPU is gone. (In a container the kernel's pids are not ours.)
X2  A number in CUDA_VISIBLE_DEVICES counts GPUs by their PCI addresses, as CUDA does where all are equal.
"""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from argosy.control import DeviceFault

MEANINGS = {
    13: "the program caused an exception on the GPU",
    31: "the program accessed an illegal address",
    43: "the GPU stopped processing",
    45: "work of the program was removed after an earlier error",
    48: "a double bit error of its memory",
    61: "an internal breakpoint of its microcontroller",
    62: "its microcontroller halted",
    63: "a page of its memory was retired or a row remapped",
    64: "a page of its memory could not be retired or a row remapped",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    92: "many single bit errors of its memory",
    94: "a contained error of its memory",
    95: "an uncontained error of its memory",
    119: "its system processor did not answer",
    120: "an error of its system processor",
}
"""From NVIDIA's list of Xid errors, in our words."""
GONE = frozenset({48, 62, 64, 79, 95, 119, 120})
"""After these NVIDIA asks for a reset of the GPU, or of the machine."""
SLACK_S = 2.0
"""The clock of the kernel's log and that of processes may differ by so much."""
LINES_MAX = 20_000

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?:, pid='?(?P<pid>\d+|<unknown>)'?)?")
_AT = re.compile(r"^(?:\d+,\d+,(?P<us>\d+)[^;]*;|(?:<\d+>)?\[\s*(?P<s>\d+\.\d+)\])")


class Xid(msgspec.Struct, frozen=True):
    """An error that a GPU reported."""

    at: float
    """Seconds since the machine started; -1 if the line does not say."""
    pci: str
    code: int
    pid: int = 0
    """Of the process that used it; 0 if the driver does not know."""

    @property
    def text(self) -> str:
        """`Xid 79 (the GPU has fallen off the bus) of the GPU at 0000:3b:00`."""
        meaning = MEANINGS.get(self.code)
        return f"Xid {self.code}{f' ({meaning})' if meaning else ''} of the GPU at {self.pci}"


class Gpu(msgspec.Struct, frozen=True):
    """A GPU as the driver names it: PCI address and unique name."""

    pci: str
    uuid: str = ""


def parse_xids(log: str) -> list[Xid]:
    """The Xids of a kernel log, oldest first: as `/dev/kmsg` gives it, or as `dmesg` prints it."""
    found: list[Xid] = []
    for line in log.splitlines():
        if (match := _XID.search(line)) is None:
            continue
        at, pid = _AT.match(line), match["pid"] or ""
        seconds = -1.0 if at is None else int(at["us"]) / 1e6 if at["us"] else float(at["s"])
        found.append(Xid(seconds, plain_pci(match["pci"]), int(match["code"]), int(pid) if pid.isdecimal() else 0))
    return found


def parse_gpu(pci: str, information: str) -> Gpu:
    """A GPU from the driver's file `/proc/driver/nvidia/gpus/PCI/information`."""
    lines = (line.partition(":") for line in information.splitlines())
    uuid = next((value.strip() for name, _, value in lines if name.strip() == "GPU UUID"), "")
    return Gpu(plain_pci(pci), uuid)


def plain_pci(text: str) -> str:
    """Domain, bus and device without the function: logs leave that out, directories do not."""
    return text.lower().partition(".")[0]


def blame_device(xids: Iterable[Xid], pid: int, device: str, gpus: Sequence[Gpu], since: float) -> DeviceFault | None:
    """The fault of a rank's device by the kernel's words (X1): the worst if there are several, else the first.

    `device` is the only one that the rank sees, as in CUDA_VISIBLE_DEVICES; "" if it sees all.
    """
    own = _find_gpu(device, gpus)
    about: list[Xid] = []
    for xid in xids:
        ours = own is not None and xid.pci == own.pci and (not xid.pid or xid.code in GONE)
        if (xid.pid == pid or ours) and (xid.at < 0 or xid.at >= since - SLACK_S):
            about.append(xid)
    if not about:
        return None
    worst = next((xid for xid in about if xid.code in GONE), about[0])
    return DeviceFault(worst.text, gone=worst.code in GONE)


def _find_gpu(device: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """The GPU that a name of CUDA_VISIBLE_DEVICES stands for (X2)."""
    if not device:
        return gpus[0] if len(gpus) == 1 else None
    if device.isdecimal():
        ordered = sorted(gpus, key=lambda gpu: gpu.pci)
        return ordered[int(device)] if int(device) < len(ordered) else None
    return next((gpu for gpu in gpus if gpu.uuid.startswith(device)), None)


class KernelLog:
    """Looks into the kernel's log when a rank has failed; where there is no NVIDIA driver it never reads it."""

    def __init__(self, log: Path = Path("/dev/kmsg"), gpus: Path = Path("/proc/driver/nvidia/gpus")) -> None:
        self._log, self._gpus = log, gpus

    def explain(self, pid: int, device: str, since: float) -> DeviceFault | None:
        """What it says of the device of a process that began at `since`, in seconds since the start of the machine."""
        gpus = self._list_gpus()
        return blame_device(parse_xids(self._read()), pid, device, gpus, since) if gpus else None

    def _list_gpus(self) -> list[Gpu]:
        found: list[Gpu] = []
        with suppress(OSError):
            for place in sorted(self._gpus.iterdir()):
                with suppress(OSError):
                    found.append(parse_gpu(place.name, (place / "information").read_text(errors="replace")))
        return found

    def _read(self) -> str:
        """All that the log still has. /dev/kmsg gives one record for each read; a plain file is read whole."""
        parts: list[bytes] = []
        try:
            fd = os.open(self._log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""  # No permission, or no such file.
        try:
            for _ in range(LINES_MAX):
                try:
                    part = os.read(fd, 8192)
                except BrokenPipeError:
                    continue  # Records were overwritten meanwhile: the next read gives the oldest that is left.
                except OSError:
                    break  # Nothing more for now.
                if not part:
                    break
                parts.append(part)
        finally:
            os.close(fd)
        return b"".join(parts).decode(errors="replace")
