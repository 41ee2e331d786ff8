"""Random numbers that depend on a key, not on what was drawn before: a retried step draws the same ones.

K1  The same key gives the same numbers from `random`, `numpy.random` and torch, whatever was drawn before.
"""

import _random
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
from argosy.transfer import seed_devices

_SIGNED = 0x7FFFFFFFFFFFFFFF
_ALL = 0xFFFFFFFFFFFFFFFF
_SAMPLE = struct.Struct("<QQQ")
_now = threading.local()
_python: Any = cast(Any, random.seed).__self__
_spare = np.random.MT19937(0)


def seed_generators(*key: int | str) -> None:
    """Seed the global generators of `random`, numpy and torch (if it is imported) from `key`.

    `seed_generators(seed, step, microbatch)` before a microbatch makes dropout the same in every attempt.
    """
    word = derive_key(*key)
    _set(word)
    seed_devices(word & _SIGNED)


def _set(word: int) -> None:
    """Seed the generators of the CPU."""
    _random.Random.seed(_python, word)  # What random.seed calls after slow checks of the key's type.
    _python.gauss_next = None
    np.random.seed(word & 0xFFFFFFFF)
    torch = cast(Any, sys.modules.get("torch"))
    if torch is not None:
        # torch.manual_seed visits every backend, which costs 300 times as much.
        torch.default_generator.manual_seed(word & _SIGNED)


def begin_sample(seed: int, epoch: int, index: int, *, globally: bool) -> None:
    """Seed what a source draws for one sample; `globally` only if no other thread uses the global generators."""
    digest = hashlib.blake2b(_SAMPLE.pack(seed & _ALL, epoch, index), digest_size=8).digest()
    word = int.from_bytes(digest, "little")
    _now.word = word
    if globally:
        _set(word)


def sample_rng() -> np.random.Generator:
    """Return the generator of the sample that is being made: it depends on the sample and its epoch.

    For sources that run in `Threads`, which share the global generators.
    """
    word = getattr(_now, "word", None)
    if word is None:
        raise ConfigError("sample_rng() was called outside a sample", hint="call it in a source that a Loader reads")
    return np.random.Generator(np.random.Philox(key=word))


@contextmanager
def preserved_generators() -> Generator[None]:
    """Restore the state of the global generators at the end."""
    torch = cast(Any, sys.modules.get("torch"))
    state = random.getstate()
    generator = None if torch is None else torch.default_generator
    tensor = None if generator is None else generator.get_state()
    with _other_numpy():
        try:
            yield
        finally:
            random.setstate(state)
            if generator is not None:
                generator.set_state(tensor)


@contextmanager
def _other_numpy() -> Generator[None]:
    """Let numpy's global functions draw from another generator: restoring their state would cost 80 us."""
    numpy: Any = np.random
    own, state = numpy.get_bit_generator(), numpy.get_state(legacy=False)
    numpy.set_bit_generator(_spare)
    try:
        yield
    finally:
        numpy.set_bit_generator(own)
        if state["has_gauss"]:  # The spare normal number is kept outside the generator.
            np.random.set_state(state)
