"""Text that ships with trtc: to calibrate with, and to measure on."""
