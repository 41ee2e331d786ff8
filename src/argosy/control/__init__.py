"""Decisions about the processes of a run and of a host: pure functions of values and `now`."""
