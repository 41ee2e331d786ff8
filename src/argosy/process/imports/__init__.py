"""Which packages a script will import, read from its source."""
