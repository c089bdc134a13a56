"""Opens an engine and runs its loop: plan, execute, sample, emit."""
