"""torchrun's command line: `_` in flags, `--` for programs, stream masks; flags that are ignored, with the reason."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import click

from argosy.core import ConfigError, parse_ranks
from argosy.supervise import Stream

IGNORED = {
    **dict.fromkeys(
        ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr"), "ranks of one host need no rendezvous"
    ),
    **dict.fromkeys(
        ("event_log_handler", "logs_specs", "duplicate_stdout_filters", "duplicate_stderr_filters"),
        "output and events are in the run's directory",
    ),
    "log_line_prefix_template": "lines begin with the ranks that wrote them",
    "print_completion": "`_ARGOSY_COMPLETE=bash_source argosy` prints completions",
    "monitor_interval": "exits are seen at once",
    "start_method": "ranks are forked from a warm process",
    "numa_binding": "ranks are not bound to NUMA nodes",
    "signals_to_handle": "TERM, INT and QUIT stop the run, USR1, USR2 and HUP are forwarded",
}

Function = TypeVar("Function", bound=Callable[..., Any])


def ignored_flags(function: Function) -> Function:
    """Accept torchrun's flags that have no meaning here."""
    for name in IGNORED:
        function = click.option(f"--{name.replace('_', '-')}", name, hidden=True)(function)
    return function


def say_ignored(given: Collection[str]) -> list[str]:
    """One line for each reason to ignore flags that were given."""
    reasons: dict[str, list[str]] = {}
    for name, reason in IGNORED.items():
        if name in given:
            reasons.setdefault(reason, []).append(f"--{name.replace('_', '-')}")
    return [f"ignored: {' '.join(flags)} ({reason})" for reason, flags in reasons.items()]


def visible_devices(size: int, environment: Mapping[str, str]) -> list[str]:
    """The only device that each rank sees under --virtual-local-rank; ConfigError if there are too few."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    devices = [str(index) for index in range(size)] if text is None else [each.strip() for each in text.split(",")]
    if len(devices) < size:
        raise ConfigError(f"--virtual-local-rank needs a device for each of {size} ranks: CUDA_VISIBLE_DEVICES={text}")
    return devices[:size]


class UnderscoreCommand(click.Command):
    """A command that accepts `_` in flags, and notices `--` before the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {opt for param in self.params for opt in param.opts if isinstance(param, click.Option)}
        takes_value = {
            opt for param in self.params if isinstance(param, click.Option) and not param.is_flag for opt in param.opts
        }
        result: list[str] = []
        position = 0
        while position < len(args):
            arg = args[position]
            if arg == "--":
                ctx.meta["argosy.program"] = True
                return super().parse_args(ctx, [*result, *args[position:]])
            if not arg.startswith("-"):
                break
            name, equals, value = arg.partition("=")
            dashed = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
            name = dashed if dashed in flags else name
            result.append(f"{name}{equals}{value}")
            if not equals and name in takes_value and position + 1 < len(args):
                position += 1
                result.append(args[position])
            position += 1
        return super().parse_args(ctx, [*result, *args[position:]])


def shown_streams(redirects: str, size: int, ranks: str | None = None) -> list[tuple[Stream, ...]]:
    """For each rank the streams that are shown: none outside `ranks`, and none that goes to files only."""
    hidden = [0] * size
    try:
        if redirects.isdecimal():
            hidden = [int(redirects)] * size
        else:
            for part in redirects.split(","):
                rank, mask = part.split(":")
                hidden[int(rank) if rank.isdecimal() else size] = int(mask)
    except (ValueError, IndexError):
        raise ConfigError(f"--redirects must look like 3 or 0:1,1:3: {redirects!r}") from None
    if any(mask not in range(4) for mask in hidden):
        raise ConfigError(f"--redirects takes 0 (none), 1 (stdout), 2 (stderr) or 3 (both): {redirects!r}")
    names: Sequence[tuple[Stream, int]] = (("stdout", 1), ("stderr", 2))
    chosen = range(size) if ranks is None else parse_ranks(ranks, size)
    return [tuple(name for name, bit in names if not mask & bit and rank in chosen) for rank, mask in enumerate(hidden)]
