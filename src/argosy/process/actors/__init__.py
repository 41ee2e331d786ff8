"""Actors: processes called like objects. A mesh is a run whose ranks serve calls."""
