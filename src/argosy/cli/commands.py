"""The command tree. A command's module is imported when it is chosen; `--help` needs click alone."""

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

import click

import argosy

COMMANDS = {
    "run": "Run a script, module or program as ranks.",
    "ps": "List runs and their ranks.",
    "logs": "Show what ranks wrote.",
    "why": "Explain a failed, hung or slow run on one screen.",
    "report": "Write one HTML page about a run or a trace.",
    "compare": "Compare two runs.",
    "sql": "Ask a run a question in SQL.",
    "export": "Write a run's records for other programs.",
    "metrics": "Show living runs to Prometheus.",
    "trace": "Profile ranks of a running run into one file for Perfetto.",
    "stacks": "Show where ranks are right now.",
    "debug": "Use pdb in a rank that is at a breakpoint.",
    "exec": "Run a command in a rank's environment.",
    "stop": "Stop a run, or everything.",
    "ckpt": "List, verify, compare and convert checkpoints.",
    "plan": "Predict how fast a model trains on given chips, and rank the recipes.",
    "sim": "Simulate a training step on given chips, or the goodput of a long run.",
    "chip": "Measure this machine, and list the devices that predictions know.",
    "graph": "Show what passes did to a training step, and find the one that changed the loss.",
    "clean": "Remove files of ended runs.",
    "agent": "Make this machine a host of a run that another one heads.",
    "doctor": "Check this machine and this installation.",
}


class Lazy(click.Group):
    """A group whose commands live in modules of their own."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"argosy.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = f"did you mean `argosy run {args[0]}`?" if args[0].endswith(".py") else "see `argosy --help`"
            raise click.UsageError(f"no such command: {args[0]}; {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(argosy.__version__, message="argosy %(version)s")
def cli() -> None:
    """Run a PyTorch script on this machine, keep it running through failures, and explain why it is slow or broken.

    RUN is a name, a unique prefix of one, a directory, or `last` (the default).
    """


def main() -> None:
    """Run the command line; an error that the user can correct is two lines, not a traceback."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # Closed by the parent process.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            cli(prog_name="argosy")
        except SystemExit:
            flush_output()  # Here, where a full disk can be reported: the interpreter would show a traceback.
            raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        fail("", 141)
    except OSError as error:  # A full disk, no descriptors, no permission: the system's words, not our frames.
        where = f": {error.filename}" if error.filename else ""
        fail(f"argosy: {error.strerror or error}{where}", 1)
    except Exception as error:
        from argosy.core import ArgosyError  # Here: `--help` needs click alone.

        if not isinstance(error, ArgosyError):
            raise
        fail(f"argosy: {error}" + (f"\n  hint: {error.hint}" if error.hint else ""), 2)


def flush_output() -> None:
    """Write what stdout still holds."""
    try:
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def fail(text: str, code: int) -> NoReturn:
    """End with a message on stderr; what stdout cannot take is dropped, so that the interpreter can end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):
        print(text, end="\n" if text else "", file=sys.stderr, flush=True)
    sys.exit(code)
