"""Checkpoints in an S3-like store: a real server on loopback, which can be told to fail."""

import os
import uuid
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from argosy.checkpoint import CorruptShard, KeepLast, Saver, list_steps, restore, verify
from argosy.core import ConfigError


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket on a server of its own."""
    import urllib.request

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")).close()
    yield f"s3://bucket/{uuid.uuid4().hex}"  # The server keeps its buckets for all tests of a process.
    server.stop()


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(step).random(700_000), "frozen": np.arange(50_000), "empty": np.zeros((0, 2))}


def test_saved_restored_verified_and_pruned(bucket: str):
    with Saver(bucket, keep=[KeepLast(2)]) as saver:
        for step in (1, 2, 3):
            saver.save(arrays(step), step).wait(60)
    assert [each.step for each in list_steps(bucket)] == [3, 2]
    into = {name: np.zeros_like(array) for name, array in arrays(3).items()}
    restored = restore(bucket, into=into)
    assert str(restored).startswith(f"step 3 from {bucket} in")
    assert all(np.array_equal(into[name], array) for name, array in arrays(3).items())
    assert list(verify(bucket, None)) == []


def test_an_altered_object_is_named(bucket: str):
    import obstore
    from obstore.store import from_url

    with Saver(bucket) as saver:
        saver.save(arrays(1), 1).wait(60)
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
    """(method, fault) to come, each once: a status to answer, or `half` of the body."""
    spoiled: ClassVar[list[str]] = []

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = next((each for each in self.faults if each[0] == self.command), None)
        if fault is not None:
            self.faults.remove(fault)
            self.spoiled.append(fault[1])
            if fault[1] != "half":
                self.send_response(int(fault[1]))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        skip = ("connection", "content-length", "transfer-encoding")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in skip}
        connection = HTTPConnection(self.behind, timeout=30)
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in skip:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if fault is not None else data)
        self.close_connection = True
        connection.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def faulty(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The bucket behind something that spoils requests."""
    Faulty.behind = os.environ["AWS_ENDPOINT"].removeprefix("http://")
    Faulty.faults, Faulty.spoiled = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    yield bucket
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("fault", ["500", "503"])
def test_refused_requests_are_made_again(faulty: str, fault: str):
    with Saver(faulty) as saver:
        Faulty.faults += [("PUT", fault), ("PUT", fault), ("GET", fault), ("DELETE", fault), ("HEAD", fault)]
        saver.save(arrays(1), 1).wait(60)
    found = restore(faulty)
    assert Faulty.spoiled.count(fault) >= 3
    assert np.array_equal(found.tensors["w"].numpy(), arrays(1)["w"])
    assert list(verify(faulty, None)) == []


def test_half_a_body_is_not_taken_for_a_whole_one(faulty: str):
    with Saver(faulty) as saver:
        saver.save(arrays(1), 1).wait(60)
    Faulty.faults += [("GET", "half")] * 2
    found = restore(faulty)
    assert Faulty.spoiled == ["half"] * 2
    assert np.array_equal(found.tensors["w"].numpy(), arrays(1)["w"])


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
        saver.save(arrays(1), 1).wait(60)
    assert sum("trying again" in line for line in said) == 2
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
