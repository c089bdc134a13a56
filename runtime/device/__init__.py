"""What the runtime asks of a GPU: the contract in base.py, one file an API that gives it."""
