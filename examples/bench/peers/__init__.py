"""trtc's engines beside other runtimes: one checkpoint, the same tokens, runs in turns."""
