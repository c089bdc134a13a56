"""GPUs by their drivers: the contract in base.py, and one file per API."""
