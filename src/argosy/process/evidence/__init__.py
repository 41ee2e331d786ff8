"""Evidence: stacks, hangs, out of memory, incidents, and the screen that explains them."""
