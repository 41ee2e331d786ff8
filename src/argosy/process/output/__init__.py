"""What ranks write: bounded files, tails, one readable stream."""
