"""The keeper: a process per host that owns the memory of snapshots, outlives the ranks, and writes the durable ones."""
