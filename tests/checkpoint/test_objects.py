"""Checkpoints in an S3-like store: a real server on loopback, which can be told to fail."""

import os
import re
import socket
import struct
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from argosy.checkpoint import (
    CorruptShard,
    DirectoryInUse,
    KeepLast,
    Saver,
    Unreadable,
    list_steps,
    objects,
    restore,
    verify,
)
from argosy.checkpoint.operations import Sync
from argosy.core import ConfigError


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server with a bucket."""
    import urllib.request

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    yield url
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place in the bucket."""
    settings = {
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{uuid.uuid4().hex}"


PARTS = 700_000
"""So many cells are uploaded in parts."""


def arrays(step: int, cells: int = 10_000) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(step).random(cells), "frozen": np.arange(5_000), "empty": np.zeros((0, 2))}


def test_saved_restored_verified_and_pruned(bucket: str):
    with Saver(bucket, keep=[KeepLast(2)]) as saver:
        for step in (1, 2, 3):
            saver.save(arrays(step), step).wait(300)
    assert [each.step for each in list_steps(bucket)] == [3, 2]
    into = {name: np.zeros_like(array) for name, array in arrays(3).items()}
    restored = restore(bucket, into=into)
    assert str(restored).startswith(f"step 3 from {bucket} in")
    assert all(np.array_equal(into[name], array) for name, array in arrays(3).items())
    assert list(verify(bucket, None)) == []


def test_one_place_has_one_name_however_it_is_spelt(bucket: str):
    with Saver(bucket) as saver:
        saver.save(arrays(1), 1).wait(300)
        place = bucket.removeprefix("s3://bucket/")
        for spelt in (f"{bucket}/", f"S3://bucket/{place}", f"s3://bucket/./{place}", f"s3://bucket//{place}//"):
            with pytest.raises(DirectoryInUse):
                Saver(spelt)
            assert restore(spelt).step == 1
        saver.save(arrays(2), 2).wait(300)


def test_tags_and_pins_come_and_go(bucket: str):
    with Saver(bucket, keep=[KeepLast(1)]) as saver:
        saver.save({"w": np.full(9, 1)}, 1, tag="release").wait(300)
        saver.save({"w": np.full(9, 2)}, 2).wait(300)
        saver.pin(2)
        saver.save({"w": np.full(9, 3)}, 3).wait(300)
        assert [each.step for each in list_steps(bucket)] == [3, 2, 1]
        saver.untag("release")
        saver.unpin(2)
        saver.save({"w": np.full(9, 4)}, 4).wait(300)
    assert [each.step for each in list_steps(bucket)] == [4]


def test_an_altered_object_is_named(bucket: str):
    import obstore
    from obstore.store import from_url

    with Saver(bucket) as saver:
        saver.save(arrays(1), 1).wait(300)
    store = from_url(bucket)
    path = next(each["path"] for batch in obstore.list(store) for each in batch if "safetensors" in each["path"])
    data = bytearray(obstore.get(store, path).bytes())
    data[5000] ^= 8
    obstore.put(store, path, bytes(data))
    with pytest.raises(CorruptShard, match="frozen"):
        restore(bucket, step=1)


class Faulty(BaseHTTPRequestHandler):
    """Stands before the server, and spoils what the test says."""

    protocol_version = "HTTP/1.1"
    behind = ""
    faults: ClassVar[list[tuple[str, str]]] = []
    """(method, fault) to come, each once: a status to answer, `half` of the body or `flip` a bit of it, `slow`, another
    `etag`, `reset` instead of an answer, `lost`: done, and then reset, or `silent`: no answer at all."""
    spoiled: ClassVar[list[str]] = []

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = next((each for each in self.faults if each[0] == self.command), None)
        kind = fault[1] if fault is not None else ""
        if fault is not None:
            self.faults.remove(fault)
            self.spoiled.append(kind)
        if kind.isdigit():
            self.send_response(int(kind))
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif kind == "reset":
            self._reset()
        elif kind == "silent":
            self.connection.recv(1)  # Until the client gives up.
            self.close_connection = True
        else:
            self._pass_on(body, kind)

    def _reset(self) -> None:
        """The connection breaks, as when a switch reboots."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        self.close_connection = True

    def _pass_on(self, body: bytes, kind: str) -> None:
        skip = ("connection", "content-length", "transfer-encoding")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in skip}
        connection = HTTPConnection(self.behind, timeout=30)
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        data = bytearray(answer.read())
        connection.close()
        if kind == "lost":
            self._reset()
            return
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
        if kind == "flip" and data:
            data[len(data) // 2] ^= 4
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in skip:
                self.send_header(name, '"other"' if kind == "etag" and name.lower() == "etag" else value)
        self.send_header("Content-Length", str(length))
        # Said, not only done: else the client sends its next request into a connection that is being closed, and that
        # request may stay without an answer until the client's deadline of 30 s.
        self.send_header("Connection", "close")
        self.end_headers()
        parts = 20 if kind == "slow" else 1
        for number in range(parts):
            self.wfile.write(
                data[number * len(data) // parts : (number + 1) * len(data) // parts // (1 + (kind == "half"))]
            )
            time.sleep(0.02 * (kind == "slow"))
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def faulty(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The bucket behind something that spoils requests."""
    Faulty.behind = os.environ["AWS_ENDPOINT"].removeprefix("http://")
    Faulty.faults, Faulty.spoiled = [], []
    with spoiling(monkeypatch):
        yield bucket


@contextmanager
def spoiling(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[], None]]:
    """Stand before the server; gives what ends that, as if the server had died."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    serving = Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    serving.start()
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")

    def end() -> None:
        server.shutdown()
        server.server_close()

    try:
        yield end
    finally:
        end()


@pytest.mark.parametrize("fault", ["500", "503", "reset", "slow", "etag"])
def test_requests_that_fail_are_made_again(faulty: str, fault: str):
    with Saver(faulty) as saver:
        Faulty.faults += [("PUT", fault), ("PUT", fault), ("GET", fault), ("DELETE", fault), ("HEAD", fault)]
        saver.save(arrays(1), 1).wait(300)
    found = restore(faulty)
    assert Faulty.spoiled.count(fault) >= 3
    assert np.array_equal(found.tensors["w"].numpy(), arrays(1)["w"])
    assert list(verify(faulty, None)) == []


def test_half_a_body_is_not_taken_for_a_whole_one(faulty: str):
    with Saver(faulty) as saver:
        saver.save(arrays(1), 1).wait(300)
    Faulty.faults += [("GET", "half")] * 2
    found = restore(faulty)
    assert Faulty.spoiled == ["half"] * 2
    assert np.array_equal(found.tensors["w"].numpy(), arrays(1)["w"])


def test_a_read_that_gets_no_answer_is_made_again(faulty: str, monkeypatch: pytest.MonkeyPatch):
    with Saver(faulty) as saver:
        saver.save(arrays(1), 1).wait(300)
    monkeypatch.setenv("AWS_TIMEOUT", "2s")
    monkeypatch.setattr(objects, "RETRY", objects.RETRY | {"retry_timeout": timedelta(seconds=1)})
    monkeypatch.setattr(objects, "RETRY_S", 1.0)
    Faulty.faults.append(("GET", "silent"))
    found = restore(faulty)
    assert Faulty.spoiled == ["silent"]
    assert np.array_equal(found.tensors["w"].numpy(), arrays(1)["w"])


def test_a_bit_that_flips_on_the_way_is_read_again(faulty: str):
    """In a root, the index, what is read to verify, or what is read to be written."""
    with Saver(faulty) as saver:
        for step in (1, 2):
            saver.save(arrays(step), step).wait(300)
    for number in range(1, 7):
        into = {name: np.zeros_like(array) for name, array in arrays(2).items()}
        Faulty.faults += [("GET", "")] * number + [("GET", "flip")]
        restored = restore(faulty, into=into)
        assert Faulty.spoiled.count("flip") == number
        assert (restored.step, restored.skipped) == (2, [])
        assert all(np.array_equal(into[name], array) for name, array in arrays(2).items())
        Faulty.faults.clear()


@pytest.mark.system
def test_an_answer_that_is_lost_costs_no_step(faulty: str):
    """The store has done it, and nobody knows: a part of the segment, its end, the index or the root."""
    said: list[str] = []
    places = [*(("PUT", number) for number in range(4)), ("POST", 0), ("POST", 1)]
    with Saver(faulty, keep=[KeepLast(9)], say=said.append) as saver:
        saver._committer.retry_after_s = (0.0,)
        for step, (method, number) in enumerate(places):
            Faulty.faults += [(method, "")] * number + [(method, "lost")]
            saver.save(arrays(step, PARTS), step).wait(300)
            assert Faulty.spoiled.count("lost") == step + 1
    assert [each.step for each in list_steps(faulty)] == [5, 4, 3, 2, 1, 0]
    assert list(verify(faulty, None)) == []
    assert said == []


def test_a_store_that_is_gone_is_said_and_tried_again(bucket: str):
    said: list[str] = []
    with Saver(bucket, say=said.append) as saver:
        saver._committer.retry_after_s = (0.0, 0.0)
        left = 2

        def fail(_: object) -> None:
            nonlocal left
            if left:
                left -= 1
                raise OSError(5, "503 Slow Down")

        saver._committer.before = fail
        saver.save(arrays(1), 1).wait(300)
    assert sum("retrying" in line for line in said) == 2
    assert restore(bucket).step == 1


@pytest.mark.parametrize("url", ["foo://x", "s3://", "://", "az://x", "file:///tmp/x", "file://x"])
def test_a_url_that_cannot_be_opened_is_one_line_that_names_it(url: str):
    for use in (list_steps, restore, Saver):
        with pytest.raises(ConfigError, match=f" {url}") as caught:
            use(url)
        assert "\n" not in str(caught.value)
        assert caught.value.hint


def test_a_bucket_that_is_not_there_is_one_line_that_names_it(bucket: str):
    with pytest.raises(OSError, match="s3://nosuch/run") as caught:
        list_steps("s3://nosuch/run")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="s3://nosuch/run cannot be written to: there is no such bucket"):
        Saver("s3://nosuch/run")
    with pytest.raises(ConfigError, match="cannot be written to: such stores cannot do this"):
        Saver("http://127.0.0.1:9/run")


def test_a_server_that_dies_in_a_save_is_said_and_the_save_and_a_restore_end(
    bucket: str, monkeypatch: pytest.MonkeyPatch
):
    """The retrying ends; here within two seconds instead of twelve."""
    monkeypatch.setattr(objects, "RETRY_S", 2.0)
    monkeypatch.setitem(objects.RETRY, "retry_timeout", timedelta(seconds=2))
    Faulty.behind = os.environ["AWS_ENDPOINT"].removeprefix("http://")
    said: list[str] = []
    with spoiling(monkeypatch) as kill, Saver(bucket, say=said.append) as saver:
        saver.save(arrays(1), 1).wait(300)
        saver._committer.retry_after_s = (0.0,)

        def die(operation: object) -> None:
            if isinstance(operation, Sync):
                saver._committer.before = None
                kill()

        saver._committer.before = die
        error = saver.save(arrays(2), 2).durable.exception(100)
        assert isinstance(error, OSError)
        assert "\n" not in str(error)
        assert re.search("; retrying in 0 s$", said[0])
        with pytest.raises(Unreadable) as caught:
            restore(bucket)
        assert "error sending request" in str(caught.value)
    assert all("\n" not in line for line in said)


def test_an_upload_that_the_store_forgot_is_one_line(faulty: str):
    """A 404 in the middle of a multipart upload."""
    said: list[str] = []
    with Saver(faulty, say=said.append) as saver:
        saver._committer.retry_after_s = (0.0,)
        Faulty.faults += [("PUT", "404")]
        saver.save(arrays(1, PARTS), 1).wait(300)
    (line,) = said
    assert "404" in line or "not found" in line
    assert "\n" not in line
    assert len(line) < 500
    assert list(verify(faulty, None)) == []
