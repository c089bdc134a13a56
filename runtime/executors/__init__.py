"""Executors run steps: the contract in base.py, and one thin implementation per kind of engine."""
