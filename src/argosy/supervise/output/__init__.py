"""Log files and the merged stream."""
