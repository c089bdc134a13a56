"""The server process: its engines, its frontends, its start and shutdown."""
