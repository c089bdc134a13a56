"""Quantisation: schemes, calibration, importing quantised checkpoints, accuracy."""
