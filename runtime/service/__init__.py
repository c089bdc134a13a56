"""What serves many clients of several engines, whatever their protocols: names, limits, streams."""
