"""Graph rewriting: one pass a file, order.py is the table of contents."""
