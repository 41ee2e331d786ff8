"""The machine and the leftovers: `argosy doctor` and `argosy clean`."""
