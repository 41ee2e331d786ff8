"""Names of ranks, how processes end, and errors that survive a journey between processes."""

import pickle
import signal

import msgspec
import pytest

from argosy.core import (
    ArgosyError,
    ConfigError,
    DeadlinePassed,
    PeerLost,
    RankId,
    WaitStatus,
    format_ranks,
    parse_ranks,
    signal_name,
)


@pytest.mark.parametrize(
    ("indices", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3, 7], "0-3,7"), ([5, 5, 4], "4-5"), ([9, 0, 1, 5, 6], "0-1,5-6,9")],
)
def test_sets_of_ranks_are_written_short(indices: list[int], text: str):
    assert format_ranks(indices) == text


@pytest.mark.parametrize(
    ("text", "indices"), [("0-3,7", [0, 1, 2, 3, 7]), ("2", [2]), (" 1 , 0", [0, 1]), ("3-3", [3])]
)
def test_sets_of_ranks_are_read(text: str, indices: list[int]):
    assert parse_ranks(text, 8) == indices


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "3-1", "8", "0-8", "1.5"])
def test_bad_sets_of_ranks_are_refused(text: str):
    with pytest.raises(ConfigError):
        parse_ranks(text, 8)


def test_a_huge_range_is_refused_before_it_is_made():
    with pytest.raises(ConfigError, match="does not exist"):
        parse_ranks("0-99999999999999", 8)


def test_a_rank_is_named_with_its_generation():
    assert str(RankId("main", 3, 1)) == "main/3.1"
    assert RankId("main", 3, 1) > RankId("main", 3, 0)


@pytest.mark.parametrize(
    ("raw", "status", "text", "code"),
    [
        (0, WaitStatus(code=0), "exit code 0", 0),
        (3 << 8, WaitStatus(code=3), "exit code 3", 3),
        (9, WaitStatus(signal=9), "killed by SIGKILL", 137),
        (11 | 0x80, WaitStatus(signal=11), "killed by SIGSEGV", 139),
    ],
)
def test_a_wait_status_is_read_and_spoken(raw: int, status: WaitStatus, text: str, code: int):
    assert WaitStatus.from_wait(raw) == status
    assert str(status) == text
    assert status.shell_code == code
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=WaitStatus) == status


def test_an_unknown_status_is_a_failure():
    assert not WaitStatus().ok
    assert WaitStatus().shell_code == 1
    assert str(WaitStatus()) == "exit status unknown"


def test_signals_have_names():
    assert signal_name(15) == "SIGTERM"
    assert signal_name(signal.SIGRTMIN + 3) == "SIGRTMIN+3"
    assert signal_name(200) == f"SIGRTMIN+{200 - signal.SIGRTMIN}"
    assert signal_name(0) == "signal 0"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("wrong: 3", hint="use 4"),
        PeerLost("rank 2", "killed by SIGKILL", hint="wait"),
        DeadlinePassed("the barrier", 3.5, hint="look at rank 1"),
    ],
)
def test_errors_survive_pickling(error: ArgosyError):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.hint == error.hint
