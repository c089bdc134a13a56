"""What a caller may ask for and is told, checked in one place."""
