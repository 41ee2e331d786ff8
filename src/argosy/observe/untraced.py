"""Keep Dynamo from compiling the hooks' own frames: tried one by one, they would be graph breaks of the user's."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def untraced(torch: Any, function: Callable[..., Any], callees: bool = False) -> None:
    """Let `function` run as it is where Dynamo meets it as a frame, with `callees` all that it calls too.

    Inlining is not affected: inside of a graph the hooks are traced, and vanish.
    """
    with suppress(Exception):  # Of torch's insides: without them it is as if this were not here.
        frames = torch._C._dynamo.eval_frame
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if callees else default)
        frames.set_code_exec_strategy(getattr(function, "__code__"), strategy)  # noqa: B009 (any callable)
