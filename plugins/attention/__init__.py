"""What the attention operators share."""
