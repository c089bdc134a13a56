"""Serves many clients from several engines, for all protocols: names, limits, streams."""
