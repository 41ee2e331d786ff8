"""The state of Lightning's callbacks, as something that a run tracks: a replaced rank decides as the others do.

What is kept is what a checkpoint of Lightning has of a callback: the best checkpoints, how long nothing got better.
"""
# pyright: reportUnknownMemberType=false, reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import pickle
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_LARGE = 1 << 20
"""Bytes of a callback's state that is too large for a copy at every step, such as averaged weights."""


class CallbackStates:
    """Of all callbacks whose state is small."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks: dict[str, Any] = {}
        for each in callbacks:
            with suppress(Exception):  # It cannot be pickled: Lightning could not save it either.
                if len(pickle.dumps(each.state_dict())) <= _LARGE:
                    self._callbacks[each.state_key] = each

    def state_dict(self) -> dict[str, str]:
        return {key: pickle.dumps(each.state_dict()).hex() for key, each in self._callbacks.items()}

    def load_state_dict(self, found: dict[str, str]) -> None:
        now = self.state_dict()
        for key, text in found.items():
            if key in self._callbacks and now[key] != text:
                self._callbacks[key].load_state_dict(pickle.loads(bytes.fromhex(text)))
