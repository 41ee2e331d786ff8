"""The daemons of a host: warden, agent, and what they say to each other."""
