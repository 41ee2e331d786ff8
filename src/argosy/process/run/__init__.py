"""A run: what is asked for, what is decided, what happened, where it is kept."""
