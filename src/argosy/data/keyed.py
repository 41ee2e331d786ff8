"""Random numbers that depend on a key and not on history: drawn again when work is done again.

K1  The same key gives the same numbers from `random`, `numpy.random` and torch, whatever was drawn before.
"""

import hashlib
import random
import struct
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from argosy.core import ConfigError
from argosy.data.permute import derive_key

_SIGNED = 0x7FFFFFFFFFFFFFFF
_ALL = 0xFFFFFFFFFFFFFFFF
_SAMPLE = struct.Struct("<QQQ")
_now = threading.local()


def seed_generators(*key: int | str) -> None:
    """Set the global generators of `random`, numpy and torch (where it is imported) from `key`.

    `seed_generators(seed, step, microbatch)` before a microbatch makes dropout the same in every attempt.
    """
    word = derive_key(*key)
    _set(word)
    torch = cast(Any, sys.modules.get("torch"))
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(word & _SIGNED)


def _set(word: int) -> None:
    """Key the generators of the CPU."""
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch = cast(Any, sys.modules.get("torch"))
    if torch is None or not hasattr(torch, "default_generator"):
        return
    # torch.manual_seed asks every backend, which costs 300 times as much.
    torch.default_generator.manual_seed(word & _SIGNED)


def begin_sample(seed: int, epoch: int, index: int, *, globally: bool) -> None:
    """Key what a source draws for one sample; `globally` only where no other thread draws."""
    digest = hashlib.blake2b(_SAMPLE.pack(seed & _ALL, epoch, index), digest_size=8).digest()
    word = int.from_bytes(digest, "little")
    _now.word = word
    if globally:
        _set(word)


def sample_rng() -> np.random.Generator:
    """Return the generator of the sample that is being made: the same sample and epoch, the same numbers.

    For sources that run in `Threads`, where the global generators belong to everybody.
    """
    word = getattr(_now, "word", None)
    if word is None:
        raise ConfigError("there is no sample here: sample_rng() is for code that a Loader calls to make one")
    return np.random.Generator(np.random.Philox(key=word))


@contextmanager
def undisturbed() -> Generator[None]:
    """Give the global generators back as they were."""
    torch = cast(Any, sys.modules.get("torch"))
    states = random.getstate(), np.random.get_state()
    generator = None if torch is None else torch.default_generator
    tensor = None if generator is None else generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if generator is not None:
            generator.set_state(tensor)
