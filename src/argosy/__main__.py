"""`python -m argosy` is the `argosy` command."""

from argosy.cli import main

main()
