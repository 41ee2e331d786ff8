"""Errors of GPUs in the kernel's log: which rank they are about, and whether its GPU can be used again."""

from pathlib import Path

import pytest

from argosy.control import DeviceFault
from argosy.supervise.evidence.xid import Gpu, KernelLog, Xid, blame_device, parse_gpu, parse_xids

KMSG = """\
6,1201,95000000,-;usb 1-1: new device
4,1234,100500000,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=4321, name=python3, Ch 00000010, intr 10000000. MMU Fault
4,1235,100600000,-;NVRM: Xid (PCI:0000:AF:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
 SUBSYSTEM=pci
"""
DMESG = """\
[   12.500000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module
[  100.500000] NVRM: Xid (PCI:0000:3b:00): 31, pid=4321, name=python3, Ch 00000010, intr 10000000. MMU Fault
[Mon Jan  5 10:00:00 2026] NVRM: Xid (0000:af:00): 48, An uncorrectable double bit error
"""
INFORMATION = """\
Model: \t\t NVIDIA A100-SXM4-40GB
IRQ:   \t\t 215
GPU UUID: \t GPU-8a1b2c3d-0000-1111-2222-333344445555
Video BIOS: \t 92.00.19.00.01
Bus Location: \t 0000:3b:00.0
Device Minor: \t 0
"""
GPUS = [Gpu("0000:3b:00", "GPU-8a1b2c3d-0000"), Gpu("0000:af:00", "GPU-99ee")]
ILLEGAL = Xid(100.5, "0000:3b:00", 31, 4321)
GONE = Xid(100.6, "0000:af:00", 79)


def test_records_of_the_kernel_are_read():
    assert parse_xids(KMSG) == [ILLEGAL, GONE]


def test_lines_of_dmesg_are_read_also_old_ones_and_those_with_a_date():
    assert parse_xids(DMESG) == [ILLEGAL, Xid(-1.0, "0000:af:00", 48)]


@pytest.mark.parametrize("text", ["", "NVRM: Xid", "NVRM: Xid (PCI:0000:3b:00): many", "\0\xff", "Xid 79"])
def test_other_text_has_no_xid(text: str):
    assert parse_xids(text) == []


def test_a_gpu_is_read_from_the_drivers_file():
    assert parse_gpu("0000:3b:00.0", INFORMATION) == Gpu("0000:3b:00", "GPU-8a1b2c3d-0000-1111-2222-333344445555")
    assert parse_gpu("0000:3B:00.0", "nothing") == Gpu("0000:3b:00")


@pytest.mark.parametrize(
    ("pid", "device", "since", "code"),
    [
        (4321, "0", 90.0, 31),
        (4321, "", 90.0, 31),  # by its process
        (9, "0", 90.0, 0),  # another process of its GPU
        (9, "1", 90.0, 79),
        (9, "GPU-99", 90.0, 79),
        (9, "GPU-8a", 90.0, 0),
        (9, "7", 90.0, 0),
        (9, "", 90.0, 0),
        (9, "1", 200.0, 0),  # before it began
    ],
)
def test_x1_a_rank_is_told_what_its_process_or_its_gpu_did_while_it_lived(
    pid: int, device: str, since: float, code: int
):
    fault = blame_device([ILLEGAL, GONE], pid, device, GPUS, since)
    assert (0 if fault is None else int(fault.cause.split()[1])) == code


def test_the_worst_is_named_and_says_whether_the_gpu_can_be_used_again():
    both = [ILLEGAL, Xid(101.0, "0000:3b:00", 79)]
    assert blame_device(both, 4321, "0", GPUS, 90.0) == DeviceFault(
        "Xid 79 (the GPU has fallen off the bus) of the GPU at 0000:3b:00", gone=True
    )
    assert blame_device(both[:1], 4321, "0", GPUS, 90.0) == DeviceFault(
        "Xid 31 (the program accessed an illegal address) of the GPU at 0000:3b:00"
    )
    assert Xid(0.0, "0000:3b:00", 999).text == "Xid 999 of the GPU at 0000:3b:00"


def test_the_log_is_read_where_there_is_a_driver(tmp_path: Path):
    (tmp_path / "log").write_text(KMSG)
    place = tmp_path / "gpus" / "0000:3b:00.0"
    log = KernelLog(tmp_path / "log", tmp_path / "gpus")
    assert log.explain(4321, "0", 90.0) is None
    place.mkdir(parents=True)
    (place / "information").write_text(INFORMATION)
    found = log.explain(4321, "0", 90.0)
    assert found is not None
    assert found.cause.startswith("Xid 31")
    assert KernelLog(tmp_path / "none", tmp_path / "gpus").explain(4321, "0", 90.0) is None


def test_this_machines_own_log_can_be_read(tmp_path: Path):
    """It has no Xid of process 1; reading it ends, and needs no permission that is missing."""
    place = tmp_path / "gpus" / "0000:3b:00.0"
    place.mkdir(parents=True)
    (place / "information").write_text(INFORMATION)
    assert KernelLog(gpus=tmp_path / "gpus").explain(1, "", 1e12) is None
