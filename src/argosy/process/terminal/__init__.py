"""The user's side: reaching the agent, a run in the foreground."""
