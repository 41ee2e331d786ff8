"""Whether a save is called inside of an optimizer's step, by the frames of this thread: from a hook or a closure, where
the state is whole, or in the middle of it, as signal handlers are."""

import inspect
import os
import sys
from types import CodeType, FrameType
from typing import Any, Literal

OPTIMIZER = os.path.join("torch", "optim", "optimizer.py")


def place_in_step() -> Literal["outside", "whole", "middle"]:
    """Where this thread is: `middle`, where some tensors may be stepped and others not."""
    frame, below = sys._getframe(), None  # pyright: ignore[reportPrivateUsage]
    is_inside = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(OPTIMIZER):
            is_inside = True
            if code.co_name == "wrapper":  # It calls hooks, the step itself, and hooks again.
                is_hook = "out" in frame.f_locals or _is_called(frame.f_locals.get("pre_hook"), below)
                return "whole" if is_hook else "middle"
        elif code.co_name == "step" and _is_called(frame.f_locals.get("closure"), below):
            # A closure is called before anything is stepped, except by those that search along a line.
            return "middle" if type(frame.f_locals.get("self")).__name__ == "LBFGS" else "whole"
        frame, below = frame.f_back, frame
    return "whole" if is_inside else "outside"


def _is_called(function: Any, frame: FrameType | None) -> bool:
    """Whether a frame is a call of this function; yes where its code cannot be looked at."""
    if function is None or frame is None:
        return False
    inner = getattr(function, "func", getattr(function, "__func__", function))
    method: Any = inspect.getattr_static(inner, "__call__", None)
    code = getattr(inner, "__code__", getattr(method, "__code__", None))
    return not isinstance(code, CodeType) or code is frame.f_code
