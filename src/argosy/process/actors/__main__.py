"""What a rank of a mesh runs: `python -m argosy.process.actors`."""

from argosy.process.actors.host import main

main()
