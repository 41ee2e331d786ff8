"""Decide which accelerator a replaced rank gets after devices failed.

Pure. A device is named as CUDA_VISIBLE_DEVICES names it, on a host. Where ranks choose their devices themselves a
rank's number stands for its device.

V1  A device that failed `FAILURES_MAX` times in a launch, or is gone, is not used again in this launch.
V2  A spare device of the same host takes its place. Without one the run ends, with that reason.
"""

from collections.abc import Iterable

import msgspec

from argosy.control.facts import DeviceExcluded
from argosy.control.launch import Launch
from argosy.control.restart import GiveUp
from argosy.core import host_label

FAILURES_MAX = 3
"""Another process on the same device often does better: many errors are the program's, and go with the process."""


class DeviceFault(msgspec.Struct, frozen=True):
    """A device reported an error to a rank or, about it, to the kernel."""

    cause: str = ""
    """In words, if the kernel's log has some; the rank's own words are in its output."""
    gone: bool = False
    """No process can use the device before it is reset."""


class Devices(msgspec.Struct):
    """What is known of the devices of a launch. Its size grows with the number of failures only."""

    failures: dict[str, dict[str, int]] = {}
    """By host and device."""
    excluded: dict[str, list[str]] = {}
    """By host."""
    replaced: dict[int, tuple[str, str]] = {}
    """Host and device of each rank that has another device than the launch gave it."""


def device_of(launch: Launch, index: int, host: str, devices: Devices) -> str:
    """The only device that a rank sees; "" if it sees all."""
    place, device = devices.replaced.get(index, ("", ""))
    if device and place == host:
        return device
    return launch.devices[index % launch.ranks_per_host] if launch.devices else ""


def devices_given(devices: Devices, host: str, ranks: Iterable[int]) -> dict[int, str]:
    """The devices of those ranks of a host that have another one than the launch says."""
    found = {index: devices.replaced[index] for index in ranks if index in devices.replaced}
    return {index: device for index, (place, device) in found.items() if place == host}


def explain_fault(
    launch: Launch, devices: Devices, index: int, host: str, seen: DeviceFault | None
) -> tuple[DeviceFault, str]:
    """The fault of a rank's device, and in words: `device 3 failed: Xid 79 (the GPU has fallen off the bus)`."""
    fault, device = seen or DeviceFault(), device_of(launch, index, host, devices)
    which = f"device {device}" if device else "its device"
    return fault, f"{which} failed{f': {fault.cause}' if fault.cause else ''}"


def replace_device(
    launch: Launch, devices: Devices, index: int, host: str, fault: DeviceFault, now: float
) -> DeviceExcluded | GiveUp | None:
    """Count a failure of a rank's device, and decide what the replacement uses; None: the same device."""
    device = device_of(launch, index, host, devices)
    name = device or f"of rank {index}"
    counts, excluded = devices.failures.setdefault(host, {}), devices.excluded.setdefault(host, [])
    counts[name] = counts.get(name, 0) + 1
    if not fault.gone and counts[name] < FAILURES_MAX:
        return None
    excluded.append(name)  # V1
    how = f"cannot be used before it is reset ({fault.cause})" if fault.gone else f"failed {counts[name]} times"
    reason = f"device {name} {how}: it is not used again in this run"
    first = index - index % launch.ranks_per_host
    used = {device_of(launch, first + local, host, devices) for local in range(launch.ranks_per_host)}
    for spare in launch.spare_devices:
        if spare not in used and spare not in excluded:  # V2
            devices.replaced[index] = host, spare
            return DeviceExcluded(at=now, rank=index, host=host_label(host), device=device, spare=spare, reason=reason)
    return GiveUp(f"{reason}, and there is no spare one")
