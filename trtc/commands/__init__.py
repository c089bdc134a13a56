"""One file a subcommand; each exposes `command`, and trtc/cli.py lists them."""
