"""What `argosy run` takes over from torchrun's command line: `_` in flags, `--` for programs, stream masks."""

from collections.abc import Sequence

import click

from argosy.core import ConfigError
from argosy.process import Stream


class UnderscoreCommand(click.Command):
    """A command whose flags may be spelled with `_`, and that notices `--` before the script."""

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


def shown_streams(redirects: str, size: int) -> list[tuple[Stream, ...]]:
    """Per rank the streams that reach the terminal: all but those that go to files only.

    Raises:
        ConfigError: the text is none of torchrun's forms.
    """
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
    return [tuple(name for name, bit in names if not mask & bit) for mask in hidden]
