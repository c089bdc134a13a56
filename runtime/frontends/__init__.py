"""Ways into an engine: each takes drafts, gives events and words errors in its own dialect."""
