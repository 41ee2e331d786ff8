"""Keep Dynamo from compiling the hooks' own frames, each of which would add a graph break to the user's script."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def skip_dynamo(torch: Any, function: Callable[..., Any], callees: bool = False) -> None:
    """Let Dynamo run the frames of `function` uncompiled; with `callees`, the frames that it calls as well.

    Inlining is not affected: inside a graph the hooks are traced, and leave nothing in it.
    """
    with suppress(Exception):  # Private names of torch: a version without them compiles the hooks.
        frames = torch._C._dynamo.eval_frame
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if callees else default)
        frames.set_code_exec_strategy(getattr(function, "__code__"), strategy)  # noqa: B009 (any callable)
