"""Checkpoints in an S3-like store: a real server on loopback, which can be told to fail."""

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from argosy.checkpoint import CorruptShard, KeepLast, Saver, list_steps, restore, verify

pytest.importorskip("obstore")
server_module = pytest.importorskip("moto.server")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket on a server of its own."""
    import urllib.request

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
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


def test_failures_of_the_store_are_tried_again(bucket: str):
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
