"""Record the configuration of a run: what a script passes, and what it parses with argparse. Never secrets."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, cast

from argosy.observe.rank_journal import rank_journal

SECRET = re.compile(r"token|secret|passw|credential|api_?key|private|auth", re.IGNORECASE)
_ENVIRONMENT = re.compile(
    r"(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|CUDA_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|PYTORCH_\w+|TORCH_\w+|NCCL_\w+|"
    r"GLOO_\w+|WORLD_SIZE|PYTHONHASHSEED|PYTHONOPTIMIZE|MALLOC_\w+|LD_PRELOAD|KMP_\w+|TOKENIZERS_PARALLELISM"
)
_TEXT_MAX = 1000
_DEPTH_MAX = 6
_parsed: list[object] = []


def record_config(config: object) -> None:
    """Keep a configuration with the run: a dict, a dataclass, or what argparse returns. Secrets are masked."""
    rank_journal.write("config", config=plain(config))


def plain(value: Any, depth: int = 0) -> Any:
    """A value as maps, lists, numbers and short texts; what looks like a secret is masked."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain({each.name: getattr(value, each.name) for each in fields(value)}, depth)
    if isinstance(value, Mapping) and depth < _DEPTH_MAX:
        items = cast("Mapping[object, object]", value).items()
        return {str(k): "(masked)" if SECRET.search(str(k)) else plain(v, depth + 1) for k, v in items}
    if isinstance(value, (list, tuple)) and depth < _DEPTH_MAX:
        return [plain(each, depth + 1) for each in cast("list[object]", value)[:100]]
    other: object = cast(object, value)
    if type(other).__name__ == "Namespace" and hasattr(other, "__dict__"):
        return plain(vars(other), depth)
    return str(other)[:_TEXT_MAX]


def record_start() -> None:
    """When training begins: keep the part of the environment that changes how torch runs, and what argparse parsed."""
    chosen = {name: value[:_TEXT_MAX] for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
    threads = None
    with suppress(Exception):
        threads = sys.modules["torch"].get_num_threads()
    rank_journal.write("start", environment=chosen, python=sys.version.split()[0], pid=os.getpid(), threads=threads)
    while _parsed:
        record_config(_parsed.pop(0))


def watch_argparse() -> None:
    """Remember what the script parses; a script that never trains leaves no record."""
    import argparse

    with suppress(Exception):
        _watch(argparse.ArgumentParser)


def _watch(parser: Any) -> None:
    original: Callable[..., Any] = parser.parse_args
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def parse_args(*args: Any, **kwargs: Any) -> Any:
        parsed = original(*args, **kwargs)
        with suppress(Exception):
            _parsed.append(parsed)
            del _parsed[:-8]
        return parsed

    parser.parse_args = parse_args
