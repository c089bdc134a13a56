"""Quantised checkpoint formats, one file each: what is stored -> trtc's canonical tensors."""
