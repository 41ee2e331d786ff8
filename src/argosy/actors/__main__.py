"""What a rank of a mesh runs: `python -m argosy.actors`."""

from argosy.actors.server import main

main()
