"""Load and latency: what `trtc bench` runs, in this process or against a server."""
