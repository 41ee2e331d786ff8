"""What is in the files of a checkpoint. JSON and safetensors; nothing is ever unpickled.

    checkpoints/step-000000001204-5f3a90c10001/
        rank-00000.safetensors   the pieces that rank 0 wrote, 4 KiB before the first
        rank-00000.json          the index of rank 0: which box of which tensor lies where, with digests
        root.json                the manifest: the digests of all indexes

F1  A step counts only if its root is whole and every index has the digest that the root names.
F2  Each chunk of a tensor has its own sums, so what is read is verified, however much of it is read.
F3  A run that went back to an older step begins an era (`step-000000001000.1-…`): all of it is newer than what was.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import TypeVar

import msgspec

from argosy.core import ArgosyError, ConfigError
from argosy.transfer import CHUNK_BYTES, DTYPES, Box, Sums, Value, cut

T = TypeVar("T")
FORMAT = 1
BLOCK = 4096
ROOT = "root.json"
NO_FILE = "no such file"
NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError)
"""What decoding raises where a flipped bit made it no JSON, or no text at all."""
_FORMAT = re.compile(rb'\{"format":(\d{1,9}),')
_NAME = re.compile(r"step-(\d{12})(?:\.(\d+))?-([0-9a-f]+)")


class CorruptShard(ArgosyError):
    """Bytes do not match the digest in their manifest: use an older step, or another copy."""

    def __init__(self, path: str, what: str, expected: str, actual: str) -> None:
        super().__init__(path, what, expected, actual)
        self.path, self.what, self.expected, self.actual = path, what, expected, actual

    def __str__(self) -> str:
        if self.actual == NO_FILE:
            return f"{self.path} is missing: {self.what}: expected {self.expected}"
        return f"digest mismatch in {self.path}: {self.what}: expected {self.expected}, read {self.actual}"


class StepNotFound(ArgosyError):
    """No such step was committed."""


class Unreadable(ArgosyError):
    """What is stored cannot be read, or none of it is whole: do not start over."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One box of one tensor, contiguous in a file."""

    name: str
    key: str
    unit: str
    role: str
    kind: str = "same"
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: str
    """Relative to the directory of checkpoints; it may belong to an older step."""
    offset: int
    sums: list[str]
    """32 hex digits for each chunk that `chunks` cuts."""

    @property
    def bytes(self) -> int:
        return bytes_of(self.box.shape, self.dtype)

    @property
    def label(self) -> str:
        """Its name in a safetensors file: that of the tensor if it is whole."""
        return self.name if self.box.shape == self.shape else f"{self.name}{self.box}"

    def chunks(self) -> list[tuple[Box, int]]:
        """The boxes of at most 8 MiB that `sums` belong to, each with its offset in the file."""
        if 0 < self.bytes <= CHUNK_BYTES:
            return [(self.box, self.offset)]
        size, offset = DTYPES[self.dtype], self.offset
        found: list[tuple[Box, int]] = []
        for part in cut(self.box, CHUNK_BYTES // size):
            found.append((part, offset))
            offset += part.cells * size
        return found


@lru_cache(1 << 14)
def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """The bytes of a box. There are few shapes, of which it is asked again and again."""
    return prod(shape) * DTYPES[dtype]


class UnitInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a unit has besides tensors."""

    options: dict[str, Value] = {}
    aliases: tuple[str, ...] = ()


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote; rank 0 also says what is not a tensor."""

    format: int = FORMAT
    rank: int
    step: int
    shared: str = ""
    """A digest of which tensors this rank takes to be on all ranks."""
    needs: list[str] = []
    """Directories of older steps that entries refer to."""
    bytes: int = 0
    entries: list[Entry]
    values: dict[str, Value] = {}
    units: dict[str, UnitInfo] = {}
    modules: dict[str, str] = {}
    """The keys of modules, each with what the names of its tensors begin with."""


class IndexHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the root needs of an index: the rest is skipped, not decoded."""

    shared: str
    needs: list[str]
    bytes: int


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to commit of a step: all its boxes as they lie in an arena, and what is not a tensor."""

    step: int
    name: str
    rank: int
    size: int
    """How many ranks commit this step together."""
    entries: list[Entry]
    border: int
    """Where in the arena the tensors begin that seldom change."""
    bytes: int
    room: int
    """The bytes of the segment's header."""
    shared: str = ""
    values: dict[str, Value] = {}
    units: dict[str, UnitInfo] = {}
    modules: dict[str, str] = {}
    tags: list[str] = []
    metrics: dict[str, float] = {}


class Part(msgspec.Struct, frozen=True, gc=False):
    """An index as its root knows it."""

    file: str
    bytes: int
    digest: str


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a step."""

    format: int = FORMAT
    step: int
    era: int = 0
    session: str
    saved_at: float
    size: int
    parts: list[Part]
    needs: list[str] = []
    """Directories of older steps that entries refer to."""
    tags: list[str] = []
    metrics: dict[str, float] = {}
    bytes: int = 0
    argosy: str = ""


def root_of(draft: Draft, saved_at: float, argosy: str = "") -> Root:
    """The manifest of a step, before its indexes are known."""
    session = draft.name.rpartition("-")[2]
    return Root(
        step=draft.step,
        era=era_of(draft.name),
        session=session,
        saved_at=saved_at,
        size=draft.size,
        parts=[],
        tags=draft.tags,
        metrics=draft.metrics,
        argosy=argosy,
    )


class _Sealed(msgspec.Struct):
    digest: str
    body: msgspec.Raw


def step_name(step: int, attempt: str, era: int = 0) -> str:
    return f"step-{step:012d}{f'.{era}' if era else ''}-{attempt}"


def step_of(name: str) -> int | None:
    """The step of a directory, or None if it is none of ours."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def era_of(name: str) -> int:
    """How often the run had gone back to an older step when it saved this one."""
    match = _NAME.fullmatch(name)
    return int(match[2] or 0) if match else 0


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def seal(root: Root) -> bytes:
    """The bytes of a root manifest, which carry their own digest."""
    body = msgspec.json.encode(root)
    return b'{"digest":"' + digest(body).encode() + b'","body":' + body + b"}\n"


def unseal(data: bytes, path: str) -> Root:
    """Read a root manifest.

    Raises:
        CorruptShard: it is torn or altered.
        ConfigError: a newer version of Argosy wrote it.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
    except NO_JSON as error:
        raise CorruptShard(path, "the root manifest", "JSON", str(error)) from error
    body = bytes(sealed.body)
    if digest(body) != sealed.digest:
        raise CorruptShard(path, "the root manifest", sealed.digest, digest(body))
    return _decode(body, Root, path)


def decode_index(data: bytes, part: Part) -> Index:
    """Read an index whose digest the root names."""
    if len(data) != part.bytes or digest(data) != part.digest:
        raise CorruptShard(part.file, "the index", part.digest, digest(data))
    return _decode(data, Index, part.file)


class _Versioned(msgspec.Struct):
    format: int


def _decode(data: bytes, type_: type[T], path: str) -> T:
    try:
        if (written := _format_of(data)) > FORMAT:
            raise ConfigError(
                f"{path} has format {written}, this version reads up to {FORMAT}", hint="upgrade Argosy to read it"
            )
        return msgspec.json.decode(data, type=type_)
    except NO_JSON as error:
        raise CorruptShard(path, "its form", type_.__name__, str(error)) from error


def _format_of(data: bytes) -> int:
    """Which comes first, so that a long text need not be read for it."""
    found = _FORMAT.match(data)
    return int(found[1]) if found else msgspec.json.decode(data, type=_Versioned).format


def sums_text(sums: Sums) -> str:
    return f"{sums[0]:016x}{sums[1]:016x}"


def text_sums(text: str) -> Sums:
    return int(text[:16], 16), int(text[16:], 16)


def header(pieces: Iterable[tuple[str, str, Sequence[int], int]], metadata: dict[str, str], room: int = 0) -> bytes:
    """The start of a safetensors file whose tensors (name, dtype, shape, bytes) follow without gaps.

    It is padded to 4 KiB, and to at least `room` bytes.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for name, dtype, shape, size in pieces:
        # The format has no C128; those who read the index know better.
        shown = ("F64", [*shape, 2]) if dtype == "C128" else (dtype, list(shape))
        entries[name] = {"dtype": shown[0], "shape": shown[1], "data_offsets": [position, position + size]}
        position += size
    text = msgspec.json.encode(entries)
    text = text.ljust(room - 8)
    text += b" " * (-(len(text) + 8) % BLOCK)
    return len(text).to_bytes(8, "little") + text
