"""EleutherAI's lm-evaluation-harness (package lm-eval), with an engine as its model."""
