"""The version of trtc, alone in a file so that packaging can read it without imports."""

__version__ = "0.1.0"
