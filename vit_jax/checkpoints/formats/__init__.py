"""Foreign checkpoint formats, one a file. They know trees, not modules."""
