"""One op: its reference, the op, its cost, its cases."""
