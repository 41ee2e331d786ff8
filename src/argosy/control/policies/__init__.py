"""Restart policies, one module each, found by name; `docs/contributing.md` shows how to add one.

A policy offers `affected(failed, dims, along)`: the indices to replace when rank `failed` of a mesh with
dimensions `dims` (row-major, name to extent) is lost. `along` is what stood behind the colon.
"""
