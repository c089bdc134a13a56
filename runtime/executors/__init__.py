"""What runs a step: the contract in base.py, one thin file a kind of engine."""
