"""Functions that are asked once, whatever happens to the step: judges, environments, services.

What they return is kept until the step counts, in memory that outlives the rank.
Outside a step they are called each time.
"""

import functools
import hashlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

from argosy.train.adapters.attributes import plain
from argosy.train.run import Run


def kept_calls(run: Run, functions: Any) -> Any:
    """The same function, or list of them, with what they return kept; modules and names stay as they are."""
    if isinstance(functions, list | tuple):
        return [kept_calls(run, each) for each in cast("list[Any]", functions)]
    if not callable(functions) or not hasattr(functions, "__name__"):
        return functions
    known = _Answers(run, cast(Any, functions).__name__)
    return _later(known, functions) if inspect.iscoroutinefunction(functions) else _now(known, functions)


def _now(known: "_Answers", function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def ask(*words: Any, **how: Any) -> Any:
        key = known.key(words, how)
        for answer in known.find(key):
            return answer
        return known.keep(key, function(*words, **how))

    return ask


def _later(known: "_Answers", function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def ask(*words: Any, **how: Any) -> Any:
        key = known.key(words, how)
        for answer in known.find(key):
            return answer
        return known.keep(key, await function(*words, **how))

    return ask


class _Answers:
    """Of one function."""

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._name = run, name
        self._attempt: Any = None
        self._asked = 0
        """Calls in this attempt."""

    def key(self, words: Any, how: dict[str, Any]) -> str:
        """Of the next call: its place in the step, and what it is asked. Other samples are another question."""
        if self._attempt is not self._run.current:
            self._attempt, self._asked = self._run.current, 0
        self._asked += 1
        digest = hashlib.sha256()
        for each in (*words, *(how[name] for name in sorted(how))):
            with suppress(TypeError):  # A trainer, its state, a callback: they are not the question.
                digest.update(pickle.dumps(plain(each)))
        return f"{self._name} {self._asked} {digest.hexdigest()}"

    def find(self, key: str) -> Iterator[Any]:
        step = self._run.current
        if step is not None and (kept := self._run.once.kept(step.number, key)) is not None:
            yield kept[0]

    def keep(self, key: str, answer: Any) -> Any:
        step = self._run.current
        if step is not None and not step.rehearsal:
            self._run.once.put(step.number, key, (answer,))
        return answer
