"""A device that failed: who is blamed, and which device the replacement gets."""

import pytest
from control.processes import a_launch
from control.test_run import begun, orders, rank, react, told

from argosy.control import facts
from argosy.control.device_faults import FAILURES_MAX, DeviceFault, Devices, device_of, replace_device
from argosy.control.launch import Launch, rank_variables
from argosy.control.messages import Exited, Noted, Started, StartRanks
from argosy.control.restart import GiveUp, Restart
from argosy.control.run_events import EvidenceTaken, FromHost, Tick
from argosy.control.run_state import RunState
from argosy.core import WaitStatus
from argosy.observe import Flag

HOST = "a"
FAULT = DeviceFault("Xid 31 (an illegal address was accessed)")
GONE = DeviceFault("Xid 79 (the GPU has fallen off the bus)", gone=True)


def two_of_three(**said: object) -> Launch:
    return a_launch(dims={"rank": 2}, devices=["4", "6"], spare_devices=["7"], **said)


def replaced(launch: Launch, devices: Devices, *faults: tuple[int, DeviceFault]) -> list[str]:
    """What is said after each fault: nothing, the spare device, or why there is none."""
    found: list[str] = []
    for index, fault in faults:
        answer = replace_device(launch, devices, index, HOST, fault, 1.0)
        found.append("" if answer is None else answer.spare if isinstance(answer, facts.DeviceExcluded) else "none")
    return found


def test_v1_a_device_is_used_again_until_it_has_failed_three_times():
    devices = Devices()
    assert replaced(two_of_three(), devices, (1, FAULT), (1, FAULT)) == ["", ""]
    assert device_of(two_of_three(), 1, HOST, devices) == "6"
    answer = replace_device(two_of_three(), devices, 1, HOST, FAULT, 1.0)
    assert isinstance(answer, facts.DeviceExcluded)
    assert answer.reason == "device 6 failed 3 times: it is not used again in this run"
    assert (answer.device, answer.spare, device_of(two_of_three(), 1, HOST, devices)) == ("6", "7", "7")


def test_v1_a_device_that_must_be_reset_is_excluded_at_once():
    assert replaced(two_of_three(), Devices(), (0, GONE)) == ["7"]


def test_v1_each_device_has_its_own_count():
    assert replaced(two_of_three(), Devices(), (0, FAULT), (1, FAULT), (0, FAULT), (1, FAULT)) == [""] * 4


def test_v2_a_spare_device_is_given_once():
    devices = Devices()
    assert replaced(two_of_three(), devices, (0, GONE), (1, GONE)) == ["7", "none"]
    answer = replace_device(two_of_three(), devices, 0, HOST, GONE, 1.0)  # The spare one fails, too.
    assert answer == GiveUp(
        "device 7 cannot be used before it is reset (Xid 79 (the GPU has fallen off the bus)): "
        "it is not used again in this run, and there is no spare one"
    )


def test_v2_devices_of_another_host_are_no_spare_ones():
    launch, devices = two_of_three(nodes=1), Devices()
    replace_device(launch, devices, 1, HOST, GONE, 1.0)
    assert device_of(launch, 1, "b", devices) == "6"


def test_ranks_that_choose_their_devices_themselves_have_a_count_but_no_spare_device():
    launch, devices = a_launch(dims={"rank": 2}), Devices()
    assert replaced(launch, devices, *[(1, FAULT)] * FAILURES_MAX) == ["", "", "none"]


@pytest.mark.parametrize(("given", "seen"), [("", "6"), ("7", "7")])
def test_a_rank_sees_one_device_as_its_first(given: str, seen: str):
    variables = rank_variables(two_of_three(), 1, 0, 29500, device=given)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["LOCAL_RANK"]) == (seen, "0")


# --- in a run


def running(spare: bool = True) -> RunState:
    state = begun(2, Restart(policy="auto", startup_max=10))
    launch = two_of_three(restart=Restart(policy="auto", startup_max=10))
    state.launch = launch if spare else a_launch(dims={"rank": 2}, devices=["4", "6"], restart=launch.restart)
    return state


def fail(state: RunState, generation: int, fault: DeviceFault | None = None) -> tuple[list[str], list[StartRanks]]:
    """Rank 1 ends because of its device; the causes that are recorded, and the orders that follow."""
    flags = Flag.RUN_MANAGED | Flag.REPLACE | (0 if fault else Flag.DEVICE_FAILED)
    react(state, FromHost(HOST, Noted(rank(1, generation), int(flags), 1, True)), 1.0 + generation)
    exited = Exited(rank(1, generation), WaitStatus(code=1), device=fault)
    effects = react(state, FromHost(HOST, exited), 2.0 + 10 * generation)
    recorded = [fact.device for fact in told(effects) if isinstance(fact, facts.RankExited)]
    recorded += [fact.text for fact in told(effects) if isinstance(fact, facts.DeviceExcluded)]
    recorded += [fact.reason for fact in told(effects) if isinstance(fact, facts.GaveUp)]
    effects += react(state, EvidenceTaken(rank(1, generation)), 2.1 + 10 * generation)
    effects += react(state, Tick(), 9.0 + 10 * generation)  # Where it is not replaced at once.
    started = [order for order in orders(effects) if isinstance(order, StartRanks)]
    react(state, FromHost(HOST, Started(rank(1, generation + 1), 500 + generation)), 2.2 + 10 * generation)
    return recorded, started


def test_the_device_is_named_as_the_cause_and_the_rank_replaced_on_it_then_on_a_spare_one():
    state = running()
    assert fail(state, 0) == (["device 6 failed"], [StartRanks(2, (rank(1, 1),), 29500)])
    assert fail(state, 1) == (["device 6 failed"], [StartRanks(3, (rank(1, 2),), 29500)])
    said, started = fail(state, 2)
    assert said == [
        "device 6 failed",
        "device 6 failed 3 times: it is not used again in this run (a); rank 1 continues on device 7",
    ]
    assert started == [StartRanks(4, (rank(1, 3),), 29500, "", {1: "7"})]
    # A replacement for another reason stays on the spare device.
    react(state, FromHost(HOST, Noted(rank(1, 3), int(Flag.RUN_MANAGED), 2, True)), 98.0)
    effects = react(state, FromHost(HOST, Exited(rank(1, 3), WaitStatus(signal=9))), 99.0)
    assert [fact.device for fact in told(effects) if isinstance(fact, facts.RankExited)] == [""]
    (order,) = [each for each in orders(effects) if isinstance(each, StartRanks)]
    assert order.devices == {1: "7"}


def test_what_the_kernel_says_of_the_device_is_the_cause():
    said, started = fail(running(), 0, GONE)
    assert said[0] == "device 6 failed: Xid 79 (the GPU has fallen off the bus)"
    assert started[0].devices == {1: "7"}


def test_without_a_spare_device_the_run_ends_and_says_so():
    state = running(spare=False)
    said, started = fail(state, 0, GONE)
    assert said[-1].endswith("it is not used again in this run, and there is no spare one")
    assert started == []
