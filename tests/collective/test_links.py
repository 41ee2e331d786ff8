"""Ranks that share no memory know from their links who ended, who gave the group up, and who left in peace."""

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from argosy.collective.peer_links import LinkListener, Links
from argosy.collective.peer_watcher import watcher
from argosy.collective.torch_work import ConnectionLost, Patience
from argosy.core import PeerLost

SIZE = 3


@contextmanager
def linked(strangers: bytes = b"") -> Generator[list[Links]]:
    """The links of three ranks, all in this process; with something said at each listener before the ranks come."""
    listeners = [LinkListener("127.0.0.1") for _ in range(SIZE)]
    addresses = [listener.address for listener in listeners]
    if strangers:
        for address in addresses:
            host, port, _ = address.split()
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(strangers)
    found: dict[int, dict[int, socket.socket]] = {}

    def join(rank: int) -> None:
        found[rank] = listeners[rank].link(rank, addresses, lambda: None)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    ranks = [Links(found[rank], {}, [10, 11, 12]) for rank in range(SIZE)]
    try:
        yield ranks
    finally:
        for links in ranks:
            links.close()


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def loss_of(links: Links) -> str:
    try:
        links.check()
    except PeerLost as loss:
        return str(loss)
    return ""


def test_who_ended_is_named_to_all_others():
    with linked() as (first, second, third):
        second.drop()  # as the kernel does when a process ends
        for links in (first, third):
            wait_for(lambda links=links: bool(loss_of(links)))
            assert loss_of(links) == "rank 11 is lost: its connection closed"


def test_who_gives_the_group_up_says_why_to_all():
    with linked() as (first, second, third):
        told = threading.Event()
        third.on_loss = told.set
        first.abort("generation 4 is formed")
        first.close()
        for links in (second, third):
            wait_for(lambda links=links: bool(loss_of(links)))
            assert loss_of(links) == "a rank of another group is lost: generation 4 is formed"
        assert told.wait(300)


def test_who_leaves_in_peace_is_no_loss():
    with linked() as (first, second, third):
        first.close()
        second.drop()
        wait_for(lambda: bool(loss_of(third)))  # the second one's end comes after the first one's farewell
        assert loss_of(third) == "rank 11 is lost: its connection closed"


def test_a_link_that_closes_while_its_last_word_is_read_does_not_end_the_watcher():
    ours, theirs = socket.socketpair()
    told = threading.Event()

    def hear() -> bool:
        ours.close()
        return False

    watcher().watch_fd(ours.fileno(), hear)
    theirs.send(b"bye\n")
    with linked() as (first, second, _):
        first.on_loss = told.set
        second.drop()
        assert told.wait(300)
    theirs.close()


@pytest.mark.parametrize("said", [b"\xff\xfe\x00 1\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 4096, b""])
def test_strangers_are_turned_away(said: bytes):
    with linked(said) as ranks:
        for links in ranks:
            assert loss_of(links) == ""


def test_a_forked_child_does_not_keep_links_open():
    with linked() as (first, second, _):
        ready, go = os.pipe()
        with warnings.catch_warnings():  # the watcher's thread is here: Python 3.12 warns
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.read(ready, 1)
            os._exit(0)
        try:
            second.drop()
            wait_for(lambda: bool(loss_of(first)))
            assert loss_of(first) == "rank 11 is lost: its connection closed"
        finally:
            os.write(go, b"1")
            os.waitpid(child, 0)


def test_a_connection_that_breaks_while_all_live_is_told_to_all():
    with linked() as ranks:
        patience = Patience(ranks[0], "vote through Gloo", 60.0)
        with pytest.raises(ConnectionLost, match="Connection closed by peer"):
            patience.explain(RuntimeError("Connection closed by peer"))
        wait_for(lambda: all("a connection broke" in loss_of(links) for links in ranks[1:]))


def test_a_connection_that_breaks_because_a_rank_is_lost_names_the_rank():
    with linked() as ranks:
        ranks[1].drop()
        with pytest.raises(PeerLost, match="rank 11 is lost") as caught:
            Patience(ranks[0], "vote through Gloo", 60.0).explain(RuntimeError("Connection closed by peer"))
        assert not isinstance(caught.value, ConnectionLost)
