"""An engine's files: whether they are those that were built, and stay so."""
