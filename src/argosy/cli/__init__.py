"""The `argosy` command: argv and the environment in, exit code out."""

from argosy.cli.commands import main

__all__ = ["main"]
