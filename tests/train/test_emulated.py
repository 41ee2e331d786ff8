"""On the emulated accelerator killed ranks are replaced as on the CPU; the bits are those of its undisturbed run."""

from collections.abc import Iterator

import pytest
from console import Console, terminal
from emulation import build
from voyages import SCRIPT, STEPS, Landed, campaign, check, sail

KINDS = [("plain", 2), ("sharded", 2)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A terminal whose runs train on the emulated accelerator, whose copies take 10 ms."""
    build()
    with terminal(tmp_path_factory.mktemp("emulated")) as console:
        console.env["TEST_DEVICE"] = "emul"
        yield console


@pytest.mark.system
@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_kills_in_every_part_of_a_step(emulated: Console, kind: str, ranks: int):
    check(emulated, kind, ranks, "1.0:forward:1", "0.0:before vote:3", "1.1:heal", "1.2:after vote:6")


@pytest.mark.system
def test_a_rank_whose_device_reports_an_error_is_replaced(emulated: Console):
    hard = sail(emulated, "plain", 2, "1.0:forward:3>device")
    assert "rank 1: device emul:0 failed: emul error: a copy failed" in hard.text
    assert "rank 1 failed: its device failed: emul error: a copy failed (exit code 1); restarting rank 1" in hard.text
    assert hard.digests == sail(emulated, "plain", 2).digests


@pytest.mark.system
def test_a_rank_that_runs_out_of_the_devices_memory_is_replaced_and_the_device_is_not_blamed(emulated: Console):
    hard = sail(emulated, "plain", 2, "1.0:forward:3>memory")
    assert "OutOfMemoryError: emul out of memory" in hard.text
    assert "device failed" not in hard.text
    assert hard.digests == sail(emulated, "plain", 2).digests


@pytest.mark.system
def test_after_three_errors_a_spare_device_takes_the_place_of_the_one_that_fails(emulated: Console):
    """Ranks of `-n gpu` see one device each; here the emulated one, under three names."""
    directory = emulated.cwd / "spare"
    directory.mkdir()
    deaths = [f"1.{generation}:forward:3>device" for generation in range(3)]
    words = ["run", "-n", "gpu", "--spare-gpus", "1", SCRIPT, str(directory), "plain", str(STEPS), *deaths]
    ended = emulated.run([emulated.python, "-m", "argosy", *words], env={"CUDA_VISIBLE_DEVICES": "4,6,7"})
    assert ended.code == 0, ended.text
    assert "rank 1 failed: device 6 failed: emul error: a copy failed (exit code 1)" in ended.text
    assert "device 6 failed 3 times: it is not used again in this run" in ended.text
    assert "rank 1 continues on device 7" in ended.text
    assert (directory / "sees.0").read_text().split() == ["4"]
    assert (directory / "sees.1").read_text().split() == ["6", "6", "6", "7"]
    assert Landed(directory, ended.text).digests == sail(emulated, "plain", 2).digests


@pytest.mark.system
def test_a_device_that_always_fails_ends_the_run(emulated: Console):
    directory = emulated.cwd / "sick"
    directory.mkdir()
    deaths = [f"1.{generation}:forward:3>device" for generation in range(4)]
    ended = emulated.argosy("run", "-n", "2", SCRIPT, str(directory), "plain", "9", *deaths)
    assert ended.code == 1, ended.text
    assert "device of rank 1 failed 3 times: it is not used again in this run, and there is no spare one" in ended.text
    why = emulated.argosy("why").text
    assert "its device failed: emul error: a copy failed" in why, why


@pytest.mark.soak
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_two_hundred_kills(emulated: Console, kind: str, ranks: int):
    """Prints how many ranks were killed, where, and how many trainings ended with the digest of the undisturbed one."""
    campaign(emulated, kind, ranks, "on emulated devices")
