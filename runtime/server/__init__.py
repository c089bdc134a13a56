"""One process that serves: its engines, its frontends, its start and its end."""
