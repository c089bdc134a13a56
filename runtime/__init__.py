"""Engine directory to streamed tokens."""
