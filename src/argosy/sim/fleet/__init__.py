"""Simulated hosts whose agents run the decisions that ship, on virtual time."""
