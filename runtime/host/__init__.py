"""The process and the machine that engines run on, and child processes with limits."""
