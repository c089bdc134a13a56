"""What client and server share: trtc.v1 messages and error statuses, both ways."""
