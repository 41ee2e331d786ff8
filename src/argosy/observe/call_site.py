"""Find the line of the user's script that the current call comes from."""

import os
import sys
from types import CodeType

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_FRAMES_MAX = 64
_CACHE_MAX = 4096

_HIDDEN, _LIBRARY, _USER = range(3)

_kinds: dict[str, int] = {}
_texts: dict[tuple[CodeType, int], bytes] = {}


def call_site() -> bytes:
    """Return `data.py:41` of the innermost frame of the user's code, or b"" if there is none.

    Frames of torch and Argosy are never named; frames of installed packages only if there is no other.
    """
    frame, library = sys._getframe(1), None  # pyright: ignore[reportPrivateUsage]
    for _ in range(_FRAMES_MAX):
        if frame is None:
            break
        path = frame.f_code.co_filename
        kind = _kinds.get(path)
        if kind is None:
            kind = _kinds[path] = _kind(path)
        if kind == _USER:
            break
        if kind == _LIBRARY and library is None:
            library = frame
        frame = frame.f_back
    frame = frame or library
    if frame is None:
        return b""
    key = (frame.f_code, frame.f_lasti)
    text = _texts.get(key)
    if text is None:
        if len(_texts) >= _CACHE_MAX:  # A script may exec new code in a loop.
            _texts.clear()
        text = _texts[key] = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}".encode()
    return text


def _kind(path: str) -> int:
    if path.startswith((_OURS, "<frozen", "<eval_with_key")) or f"{os.sep}torch{os.sep}" in path:
        return _HIDDEN
    packaged = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
    return _LIBRARY if packaged or path.startswith(_STDLIB) else _USER
