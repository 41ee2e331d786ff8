"""From silence alone: which host is suspected, and which never joined."""

from argosy.control.liveness import JOIN_S, RETURN_S, SILENT_S, SLOWNESS, HostSilence, silence_of_returning
from argosy.control.run_events import HostGone, HostSilent

TURN_S = 0.25


def wait(silence: HostSilence, seconds: float) -> list[HostSilent | HostGone]:
    """Turns of the head's loop in which the host says nothing."""
    told = [silence.wait(TURN_S, "b") for _ in range(round(seconds / TURN_S))]
    return [each for each in told if each is not None]


def joined() -> HostSilence:
    silence = HostSilence()
    silence.join()
    return silence


def test_a_host_that_is_silent_is_suspected():
    assert wait(joined(), SILENT_S) == [HostSilent("b")]


def test_a_host_that_speaks_in_time_is_not_suspected():
    silence = joined()
    for _ in range(10):
        assert wait(silence, SILENT_S - TURN_S) == []
        silence.hear()


def test_l1_a_host_that_was_slow_is_suspected_later():
    silence = joined()
    wait(silence, 1.0)
    silence.hear()
    assert wait(silence, SLOWNESS - TURN_S) == []
    assert wait(silence, TURN_S) == [HostSilent("b")]


def test_a_long_pause_is_forgotten_beat_by_beat():
    silence = joined()
    wait(silence, 1.5)
    silence.hear()
    for _ in range(500):
        silence.wait(0.01, "b")
        silence.hear()
    assert wait(silence, SILENT_S) == [HostSilent("b")]


def test_l2_a_host_that_never_joins_is_gone():
    silence = HostSilence()
    assert wait(silence, JOIN_S - TURN_S) == []
    assert wait(silence, TURN_S) == [HostGone("b", "it did not join within 180 s", joined=False)]


def test_hosts_have_time_to_find_a_new_agent_of_the_head():
    silence = silence_of_returning()
    assert wait(silence, RETURN_S - TURN_S) == []
    assert wait(silence, TURN_S) == [HostSilent("b")]


def test_time_in_which_the_head_itself_was_stopped_is_no_silence_of_its_hosts():
    silence = joined()
    assert [silence.wait(3600.0, "b") for _ in range(3)] == [None, None, None]
