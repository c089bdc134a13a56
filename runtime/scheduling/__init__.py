"""Which sequences run in the next step, and on which pages."""
