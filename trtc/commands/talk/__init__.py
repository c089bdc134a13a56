"""A conversation at a terminal: its state, its lines, its `/` commands."""
