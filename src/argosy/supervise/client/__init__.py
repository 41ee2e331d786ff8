"""The side of those who talk to an agent."""
