"""Sources: token files, JSON lines, Parquet, object stores; what cannot be read is named."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from argosy.core import ConfigError
from argosy.data import Jsonl, Loader, Parquet, SampleError, Shuffle, Tokens, Unreadable


def write_tokens(path: Path, count: int, dtype: Any = np.uint16) -> np.ndarray[Any, Any]:
    tokens = np.random.default_rng(count).integers(0, 50_000, count).astype(dtype)
    tokens.tofile(path)
    return tokens


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("workers", [0, 1])
def test_token_files_give_nanogpts_pairs(tmp_path: Path, dtype: Any, workers: int):
    first, second = write_tokens(tmp_path / "a.bin", 1001, dtype), write_tokens(tmp_path / "b.bin", 205, dtype)
    source = Tokens([tmp_path / "a.bin", tmp_path / "b.bin"], 10, dtype=dtype)
    assert len(source) == 100 + 20
    seen: set[int] = set()
    with Loader(source, 16, epochs=1, workers=workers) as loader:
        for x, y in loader:
            assert x.dtype == y.dtype == torch.int64
            for index, row, target in zip(loader.handed.ids, x.numpy(), y.numpy(), strict=True):
                tokens, start = (first, index * 10) if index < 100 else (second, (index - 100) * 10)
                assert row.tolist() == tokens[start : start + 10].tolist()
                assert target.tolist() == tokens[start + 1 : start + 11].tolist()
                seen.add(index)
    assert seen == set(range(120))
    assert source.where(101) == f"{tmp_path / 'b.bin'} token 10"
    assert source[3][0].tolist() == first[30:40].tolist()


def test_token_files_that_are_none_are_named(tmp_path: Path):
    with pytest.raises(Unreadable, match=r"nowhere\.bin"):
        Tokens(tmp_path / "nowhere.bin", 8)
    with pytest.raises(Unreadable, match="directory"):
        Tokens(tmp_path, 8)
    with pytest.raises(ConfigError, match="integers"):
        Tokens(tmp_path / "nowhere.bin", 8, dtype=np.float32)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(Unreadable, match="not a multiple"):
        Tokens(tmp_path / "odd.bin", 8)
    (tmp_path / "short.bin").write_bytes(b"abcd")
    with pytest.raises(ConfigError, match="empty"):
        Loader(Tokens(tmp_path / "short.bin", 8), 1)


def test_json_lines_are_found_by_index_and_errors_by_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"n": number, "text": "é\\n" * number}) for number in range(50)]
    path.write_text("\n".join(lines[:20]) + "\n\n\r\n" + "\r\n".join(lines[20:]) + "\n")
    source = Jsonl([path, path])
    assert len(source) == 100
    assert [source[index]["n"] for index in range(100)] == [*range(50), *range(50)]
    assert source.where(19) == f"{path}:20"
    assert source.where(20) == f"{path}:23"
    batch = next(iter(Loader(source, 4, shuffle=Shuffle.none())))
    assert batch["n"].tolist() == [0, 1, 2, 3]
    path.write_text('{"a": 1}\n{"a": oops}\n')
    with pytest.raises(SampleError, match=rf"{path}:2.*not JSON"):
        list(Loader(Jsonl(path), 2, epochs=1))


def test_a_last_line_without_newline_counts(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('1\n22\n"x"\n7')
    assert list(Jsonl(tmp_path / "a.jsonl")) == [1, 22, "x", 7]


def write_parquet(path: Path, rows: int, group: int) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    vectors = arrow.array([[number, number + 1, number + 2] for number in range(rows)])
    ragged = arrow.array([list(range(number % 3)) for number in range(rows)])
    columns = {
        "n": arrow.array(range(rows)),
        "x": arrow.array(np.arange(rows) / 2),
        "v": vectors,
        "text": arrow.array([f"t{number}" for number in range(rows)]),
        "ragged": ragged,
    }
    parquet.write_table(arrow.table(columns), path, row_group_size=group)


@pytest.mark.parametrize("backend", ["_Arrow", "_Duck"])
def test_parquet_by_row_groups(tmp_path: Path, backend: str):
    import argosy.data.parquet as room

    for name, rows in (("a", 95), ("b", 40)):
        write_parquet(tmp_path / f"{name}.parquet", rows, 20)
    source = Parquet([tmp_path / "a.parquet", tmp_path / "b.parquet"], columns=["n", "x", "v"])
    source._backend = getattr(room, backend)()
    assert (len(source), source.rows_per_group) == (135, 20)
    loader = Loader(source, 16, epochs=1, shuffle=Shuffle.blocks(20, 2))
    for batch in loader:
        expected = [index if index < 95 else index - 95 for index in loader.handed.ids]
        assert batch["n"].tolist() == expected
        assert batch["x"].tolist() == [index / 2 for index in expected]
        assert batch["v"].tolist() == [[index, index + 1, index + 2] for index in expected]
    whole = Parquet(tmp_path / "a.parquet")
    whole._backend = getattr(room, backend)()
    assert (whole[7]["text"], list(whole[8]["ragged"]), int(whole[94]["n"])) == ("t7", [0, 1], 94)
    assert whole.where(94) == f"{tmp_path / 'a.parquet'} row group 4 row 14"


def test_a_corrupt_row_group_is_named(tmp_path: Path):
    path = tmp_path / "a.parquet"
    write_parquet(path, 100, 50)
    content = bytearray(path.read_bytes())
    content[40 : len(content) // 3] = b"\xff" * (len(content) // 3 - 40)
    path.write_bytes(bytes(content))
    with pytest.raises(SampleError, match=r"a\.parquet.*row group 0 cannot be read"):
        list(Loader(Parquet(path, columns=["n", "v"]), 10, epochs=1, shuffle=Shuffle.none()))
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(Unreadable, match=r"a\.parquet: its row groups cannot be read"):
        Parquet(path)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves ranges of files, and 503 for the first `refusals` requests."""

    refusals = 0
    refused = 0

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.answer(head=True)

    def do_GET(self) -> None:
        self.answer(head=False)

    def answer(self, *, head: bool) -> None:
        if Ranges.refused < Ranges.refusals:
            Ranges.refused += 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path = Path(self.translate_path(self.path))
        if not path.exists():
            self.send_error(404)
            return
        content, code = path.read_bytes(), 200
        whole = len(content)
        if (wanted := self.headers.get("Range")) is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content, code = content[int(first) : int(last) + 1], 206
        self.send_response(code)
        if code == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{whole}")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.send_header("ETag", '"1"')
        self.end_headers()
        if not head:
            self.wfile.write(content)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    Ranges.refusals = Ranges.refused = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: Ranges(*args, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def store_at(url: str, retries: int) -> Any:
    from obstore import store

    return store.HTTPStore.from_url(url, client_options={"allow_http": True}, retry_config={"max_retries": retries})


def test_an_object_store_is_read_by_ranges_and_asked_again_after_503(tmp_path: Path, web: str):
    tokens = write_tokens(tmp_path / "a.bin", 1001)
    Ranges.refusals = 2
    source = Tokens("a.bin", 10, store=store_at(web, retries=5))
    x, _ = next(iter(Loader(source, 4, shuffle=Shuffle.none())))
    assert x.tolist() == tokens[:40].reshape(4, 10).tolist()
    assert Ranges.refused == 2


def test_a_store_that_answers_503_for_good_is_an_error_that_names_the_object(tmp_path: Path, web: str):
    write_tokens(tmp_path / "a.bin", 1001)
    store = store_at(web, retries=1)
    source = Tokens("a.bin", 10, store=store)
    Ranges.refusals = 10**6
    with pytest.raises(SampleError, match=r"a\.bin.*cannot be read"):
        next(iter(Loader(source, 4)))
    with pytest.raises(Unreadable, match=r"a\.bin"):
        Tokens("a.bin", 10, store=store)
