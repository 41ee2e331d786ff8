"""The distributed OS of one host: warden, agent, zygotes, ranks."""
