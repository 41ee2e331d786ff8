"""A rank's process: warm ancestors, the fork, the life of user code, the end."""
