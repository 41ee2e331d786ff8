"""Zygote, fork, user code, end."""
