"""Bits flipped anywhere are found; and every digest is needed: where one is not checked, some flip passes."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from checkpoint.saves import committed, loaded

from argosy.checkpoint import Saver, verify
from argosy.checkpoint.format import ROOT, Index, Part, Root, digest, seal, sums_text, unseal
from argosy.core import ArgosyError
from argosy.transfer import DTYPES, Box, Copy, Spot, copy_boxes, strides_of

Files = dict[str, bytes]
CLEAN = committed(1)
HEADER = 4096


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def flips(seed: int) -> Iterator[Files]:
    """Every bit of the root and of the indexes, and some of the segments."""
    rng = random.Random(seed)
    for path, data in CLEAN.items():
        is_segment = path.endswith(".safetensors")
        places = rng.sample(range(HEADER, len(data)), 30) if is_segment else range(len(data) - 1)
        for at in places:
            for bit in range(8):
                yield {**CLEAN, path: flipped(data, at, bit)}


def as_if_unchecked(change: Callable[[Files, str], Files | None]) -> Callable[[Files], Files]:
    """Give a damaged file the digest that it should have, as if nobody looked; files that are no such stay."""

    def changed(files: Files) -> Files:
        path = next(name for name in files if name.endswith(ROOT))
        try:
            return {**files, **(change(files, path) or {})}
        except (ArgosyError, msgspec.MsgspecError, UnicodeDecodeError):
            return files

    return changed


def sealed_again(files: Files, path: str) -> Files:
    body = files[path].partition(b',"body":')[2][:-2]
    return {path: b'{"digest":"' + digest(body).encode() + b'","body":' + body + b"}\n"}


def with_parts(files: Files, path: str, root: Root) -> Files:
    parts = [Part(part.file, len(files[part.file]), digest(files[part.file])) for part in root.parts]
    return {path: seal(msgspec.structs.replace(root, parts=parts))}


def indexes_again(files: Files, path: str) -> Files:
    return with_parts(files, path, unseal(files[path], path))


def summed_again(files: Files, path: str) -> Files | None:
    root = unseal(files[path], path)
    if any(digest(files[part.file]) != part.digest for part in root.parts):
        return None
    changed: Files = {}
    for part in root.parts:
        index = msgspec.json.decode(files[part.file], type=Index)
        entries = []
        for each in index.entries:
            data = np.frombuffer(files[each.file], np.uint8)
            sums = [sums_of(each.shape, each.dtype, box, data.ctypes.data + offset) for box, offset in each.chunks()]
            entries.append(msgspec.structs.replace(each, sums=sums))
        changed[part.file] = msgspec.json.encode(msgspec.structs.replace(index, entries=entries))
    return {**changed, **with_parts({**files, **changed}, path, root)}


def sums_of(shape: tuple[int, ...], dtype: str, box: Box, address: int) -> str:
    return sums_text(copy_boxes([Copy(box, shape, DTYPES[dtype], Spot(address, strides_of(box.shape)))])[0])


def load_unchecked(damaged: Iterable[Files]) -> None:
    """If what loads is no saved step, C1 is broken, which is an AssertionError."""
    for files in damaged:
        with suppress(ValueError, KeyError):  # Without a check nonsense comes as far as numpy.
            loaded(files)


def test_c1_a_flipped_bit_anywhere_is_found():
    assert loaded(CLEAN) == 1
    assert all(loaded(files) is None for files in flips(0))
    for path, data in CLEAN.items():
        assert loaded({**CLEAN, path: data[:-9]}) is None
        assert loaded({name: each for name, each in CLEAN.items() if name != path}) is None


@pytest.mark.parametrize("change", [sealed_again, indexes_again, summed_again])
def test_each_digest_check_is_needed(change: Callable[[Files, str], Files | None]):
    unchecked = as_if_unchecked(change)
    assert loaded(unchecked(CLEAN)) == 1
    with pytest.raises(AssertionError, match="C1"):
        load_unchecked(map(unchecked, flips(0)))


def test_verify_finds_every_flip_in_a_segment_and_names_it(tmp_path: Path):
    """Also in the header, which is there for others' tools."""
    arrays = {"weight": np.arange(300, dtype="<i4"), "moment": np.arange(300, dtype="<i4") * 3}
    with Saver(tmp_path) as saver:
        saver.save(arrays, 1).wait(300)
    (segment,) = tmp_path.rglob("*.safetensors")
    clean = segment.read_bytes()
    assert list(verify(tmp_path, None)) == []
    rng = random.Random(0)
    for at in (*range(0, 260, 3), HEADER - 1, *rng.sample(range(HEADER, len(clean)), 20)):
        segment.write_bytes(flipped(clean, at, rng.randrange(8)))
        (fault,) = verify(tmp_path, None)
        where = "the header" if at < HEADER else "moment" if at < HEADER + 1200 else "weight"
        assert f"rank-00000.safetensors: {where}" in fault
