"""Stacks, hangs, incidents, and why a run ended."""
