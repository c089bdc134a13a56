"""trtc's CPU engines beside other CPU runtimes: one checkpoint, the same tokens, runs in turns."""
