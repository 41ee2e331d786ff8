"""The files of runs and hosts."""
