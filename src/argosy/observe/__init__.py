"""What a rank tells about itself while it runs: progress page, journal, torch hooks."""
